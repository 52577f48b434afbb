"""Connectors that load and store nothing: to compare with, and beside others."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


class IdleConnector(KVConnectorBase_V1):
    """What is left of a step's cost with it is vLLM's own side of the hooks."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._nothing = KVConnectorMetadata()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return self._nothing

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


LOST_BLOCKS = 10


@dataclass
class Lost(KVConnectorMetadata):
    blocks: set[int]


class LosingConnector(IdleConnector, SupportsHMA):
    """Promises the beginning of each long prompt within the step, once, and loads nothing of it."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._tokens = LOST_BLOCKS * vllm_config.cache_config.block_size
        self._blocks = set()
        self._promised = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        has_more = not num_computed_tokens and request.num_tokens > self._tokens
        is_first = request.request_id not in self._promised
        return (self._tokens if has_more and is_first else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self._promised.add(request.request_id)
            self._blocks.update(blocks.get_block_ids()[0][:LOST_BLOCKS])

    def build_connector_meta(self, scheduler_output):
        lost, self._blocks = Lost(self._blocks), set()
        return lost

    def get_block_ids_with_load_errors(self):
        return self._connector_metadata.blocks

    def request_finished_all_groups(self, request, block_ids):
        return False, None


@dataclass
class Address(KVConnectorHandshakeMetadata):
    port: int


class ShakingConnector(IdleConnector, SupportsHMA):
    """Shakes hands, for ``MultiConnector``; as strict as NixlConnector about whose it is given."""

    def get_handshake_metadata(self):
        return Address(7)

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        if not all(isinstance(each, Address) for each in metadata.values()):
            raise TypeError(f"the handshake of another connector: {metadata}")

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None
