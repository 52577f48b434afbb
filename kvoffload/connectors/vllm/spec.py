"""vLLM's kind of spec, from which its scheduler half and its metrics read what concerns them."""

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmCaches
from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker

from kvoffload.connectors.vllm.engine_metrics import metric_definitions
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter
from kvoffload.connectors.vllm.settings import VllmConfigSettings


class HalvesSpec(OffloadingSpec):  # type: ignore[misc]  # untyped base
    """What vLLM reads from a spec, for :class:`KVOffloadConnector`."""

    def __init__(self, config: Any, settings: VllmConfigSettings) -> None:
        super().__init__(config)
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
