"""vLLM's kind of spec: for our own connector's halves, and for those who stay with vLLM's."""

import logging
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmCaches
from vllm.v1.kv_offload.base import (
    OffloadingMetricMetadata,
    OffloadingSpec,
)
from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker
from vllm.v1.kv_offload.base import TransferResult as VllmResult

from kvoffload import registry
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.cpu_affinity import unbound
from kvoffload.connectors.vllm.engine_metrics import metric_definitions
from kvoffload.connectors.vllm.kv_caches import GpuEnd, canonical, slot_bytes
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter, our_context
from kvoffload.connectors.vllm.settings import VllmConfigSettings, read_settings
from kvoffload.errors import ConfigError
from kvoffload.messages import CPULoadStoreSpec, LoadStoreSpec
from kvoffload.offload.base import OffloadKey
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager

log = logging.getLogger(__name__)


class HalvesSpec(OffloadingSpec):  # type: ignore[misc]  # untyped base
    """What vLLM's scheduler half reads from a spec, for :class:`KVOffloadScheduler`."""

    def __init__(self, config: Any, settings: VllmConfigSettings) -> None:
        super().__init__(config)
        self.settings = settings
        self.offload_prompt_only = settings.offload_prompt_only

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Name the metrics we emit; called in the API server's process."""
        return metric_definitions()

    def get_manager(self) -> ManagerAdapter:
        """Make the adapter; the ledger comes when the workers are known."""
        return ManagerAdapter()

    def get_worker(self, kv_caches: VllmCaches) -> VllmWorker:
        """Never called: our worker half builds its own."""
        raise NotImplementedError


class KVOffloadSpec(HalvesSpec):
    """Host memory for vLLM's own ``OffloadingConnector``, on GPU and on CPU.

    ``"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.connectors.vllm"``. Lower tiers
    need :class:`KVOffloadConnector`: vLLM's connector ends the engine when a load fails.

    Raises:
        ConfigError: a bad setting; ``backends`` among them.
    """

    def __init__(self, config: Any) -> None:
        settings = read_settings(config.extra_config)
        if settings.backends:
            raise ConfigError(
                "backends",
                [backend.type for backend in settings.backends],
                "vLLM's OffloadingConnector ends the engine when a load fails, as loads from a "
                'store can; use "kv_connector": "KVOffloadConnector", or no backends',
            )
        super().__init__(config, settings)
        self._slot_bytes = slot_bytes(config.worker_kv_bytes_per_block, settings.blocks_per_chunk)
        self._group_ids = [group.group_id for group in config.groups]

    def get_manager(self) -> ManagerAdapter:
        """Make the scheduler half."""
        num_slots = self.settings.cpu_bytes // self._slot_bytes
        policy = registry.load(registry.POLICIES, self.settings.policy, "policy")
        adapter = TrustingManager()
        ledger = TieredOffloadingManager(
            HostCache(num_slots, policy(num_slots), self._slot_bytes),
            store_threshold=self.settings.store_threshold,
            client_hints=self.settings.client_hints,
        )
        adapter.attach(ledger, num_slots)
        return adapter

    def get_worker(self, kv_caches: VllmCaches) -> VllmWorker:
        """Make the worker half."""
        return HostWorker(self.settings, self._slot_bytes, kv_caches, self._group_ids)


class TrustingManager(ManagerAdapter):
    """For a connector that knows no failure: what it calls complete is complete."""

    def complete_load(self, keys: Any, req_context: Any) -> None:
        """Unpin."""
        if self.ledger is not None:
            self.ledger.complete_load(_in_order(keys, req_context), our_context(req_context))

    def complete_store(self, keys: Any, req_context: Any, success: bool = True) -> None:
        """Make loadable."""
        if self.ledger is not None:
            self.ledger.complete_store(
                _in_order(keys, req_context), our_context(req_context), success=success
            )

    def take_events(self) -> Any:
        """See :meth:`ManagerAdapter.take_events`; vLLM answers jobs by keys."""
        self.take_jobs()
        return super().take_events()


class HostWorker(VllmWorker):  # type: ignore[misc]  # untyped base
    """GPU ↔ host memory through our handlers, under vLLM's worker verbs."""

    def __init__(
        self, settings: VllmConfigSettings, slot_bytes: int, kv_caches: VllmCaches, group_ids: Any
    ) -> None:
        ours = canonical(kv_caches, group_ids)
        self._group_ids = group_ids
        self._per_chunk = settings.blocks_per_chunk
        with unbound():
            self._spec = TieredOffloadingSpec(settings, slot_bytes, {"use": "host memory only"})
            self._transfers = self._spec.open_engine(ours)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: CPULoadStoreSpec) -> bool:
        """GPU → host."""
        end = GpuEnd(src_spec, self._group_ids, self._per_chunk)
        self._submit(job_id, end.leading(end.num_chunks), dst_spec, end.num_chunks)
        return True

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Host → GPU; nothing here is faster for being asked to be."""
        end = GpuEnd(dst_spec, self._group_ids, self._per_chunk)
        self._submit(job_id, src_spec, end.leading(end.num_chunks), end.num_chunks)
        return True

    def _submit(self, job_id: int, src: LoadStoreSpec, dst: LoadStoreSpec, chunks: int) -> None:
        self._transfers.submit(job_id, (src, dst), chunks)

    def get_finished(self) -> list[VllmResult]:
        """Return what ended."""
        return [
            VllmResult(r.job_id, r.success, r.transfer_bytes, r.transfer_time_s)
            for r in self._transfers.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these have ended."""
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Release threads and memory."""
        self._spec.close()


def _in_order(keys: Any, context: Any) -> list[OffloadKey]:
    """Order what vLLM completes as a set: the ledger wants prompts from head to tail."""
    return sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)
