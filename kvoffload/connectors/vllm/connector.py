"""The connector that vLLM loads, ``KVOffloadConnector``, and the spec that its halves read."""

import logging
import math
import time
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmCaches
from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker

from kvoffload.connectors.vllm import withheld_stores
from kvoffload.connectors.vllm.auto_chunks import choose_blocks_per_chunk
from kvoffload.connectors.vllm.client_requests import refuse_weak_hashes, warn_of_images
from kvoffload.connectors.vllm.engine_metrics import EngineStats, metric_definitions
from kvoffload.connectors.vllm.engine_weights import hash_adapters, watch_weights
from kvoffload.connectors.vllm.fingerprint import hash_root
from kvoffload.connectors.vllm.kv_caches import check_groups, check_prefixes
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter, notes_of
from kvoffload.connectors.vllm.operators import wake_for_operators
from kvoffload.connectors.vllm.quiet_steps import KnownLookup
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.connectors.vllm.start import (
    VllmConfigSettings,
    check_experts,
    check_layout,
    check_parallel,
    check_settings,
    read_settings,
    warn_of_cores,
    wished_layout,
)
from kvoffload.connectors.vllm.step_messages import IDLE_STEP, StepMetadata
from kvoffload.connectors.vllm.worker import KVOffloadWorker
from kvoffload.offload.base import ReqContext

log = logging.getLogger(__name__)


class KVOffloadConnector(OffloadingConnector):  # type: ignore[misc]  # untyped base
    """vLLM's offloading connector with our two halves; made by vLLM, once a role and process.

    Raises:
        ConfigError: a setting in ``kv_connector_extra_config`` is wrong, the KV cache of the
            model cannot be offloaded, or vLLM is untested.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_layout(vllm_config.cache_config.kv_cache_layout)
        check_groups(kv_cache_config)
        # Past OffloadingConnector's own constructor, which would build vLLM's halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        check_prefixes(vllm_config.model_config, kv_cache_config)
        check_parallel(vllm_config.parallel_config)
        check_experts(vllm_config.aux_output_config)
        settings = check_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if settings.blocks_per_chunk == "auto":
            one_block = structs.replace(settings, blocks_per_chunk=1)
            config = build_offloading_config(with_settings(vllm_config, one_block), kv_cache_config)
            is_worker = role == KVConnectorRole.WORKER
            number = choose_blocks_per_chunk(config, vllm_config, kv_cache_config, is_worker)
            settings = structs.replace(settings, blocks_per_chunk=number)
        config = build_offloading_config(with_settings(vllm_config, settings), kv_cache_config)
        self._canonical_layout = False
        self._has_stats = True
        """Whether the scheduler half did something since it was last asked for statistics."""
        self._has_events = True
        self._has_served = self._awaits_figures = False
        """Whether a request ended since the last publication of all metrics; whether workers were
        asked for the figures of the next one."""
        events = vllm_config.kv_events_config
        self._publishes = events is not None and bool(events.enable_kv_cache_events)
        # One of them is made: vLLM asks a role for its own calls alone.
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        spec = HalvesSpec(config, settings)
        if role == KVConnectorRole.SCHEDULER:
            refuse_weak_hashes(vllm_config, settings)
            warn_of_settings(vllm_config, settings)
            warn_of_images(vllm_config, settings)
            hash_adapters()
            watch_weights()
            warn_of_cores(vllm_config.device_config.device_type)
            self.connector_scheduler = KVOffloadScheduler(
                spec, settings, vllm_config, kv_cache_config
            )
            wake_for_operators()
            self.connector_scheduler.operators.serve(settings.control_socket)
        else:
            self.connector_worker = KVOffloadWorker(spec, settings, vllm_config, kv_cache_config)

    # ---- every step; without vLLM's checks of types, which cost more than the calls ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look up a waiting request, unless nothing changed since it was looked up last."""
        half = self.scheduler
        most = self._max_loadable_tokens(request, num_computed_tokens)
        asked = half.adapter.changes, num_computed_tokens, request.num_tokens, most
        notes, now_s = notes_of(half._req_status[request.request_id].req_context), time.monotonic()
        known: KnownLookup | None = notes.known
        if known is None or known.asked != asked or now_s >= known.until_s:
            answer = half.get_num_new_matched_tokens(request, num_computed_tokens, most)
            waits = {None: half.settings.lookup_timeout_s, 0: math.inf}
            until_s = now_s + waits.get(answer[0], half.patience_s)
            notes.known = known = KnownLookup(asked, answer, until_s)
            self._has_stats = True
        half.adapter.manager.request_answered(
            ReqContext(request.request_id), known.answer[0] is None
        )
        return known.answer

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return a step's orders to the workers."""
        orders: StepMetadata = self.connector_scheduler.build_connector_meta(scheduler_output)
        if orders is not IDLE_STEP:
            self._has_stats = self._has_events = True
            self._has_served |= bool(scheduler_output.finished_req_ids)
        if self._has_served and not scheduler_output.num_scheduled_tokens:
            return self._with_question(orders)
        return orders

    def _with_question(self, orders: StepMetadata) -> StepMetadata:
        """Ask workers for their figures, if this is the last step before the engine is idle."""
        if self.connector_scheduler.has_pending_push_work():
            return orders
        self._has_served, self._awaits_figures = False, True
        return replace(
            orders if orders is not IDLE_STEP else StepMetadata({}, {}), asks_figures=True
        )

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until all is done and told; vLLM asks if no request is left."""
        return self._has_served or bool(super().has_pending_push_work())

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' report, if there is one, and what any connector failed to load."""
        if connector_output.invalid_block_ids:
            lost = connector_output.invalid_block_ids
            withheld_stores.fail_after(self.scheduler, lost, self._kv_cache_manager)
        if connector_output.kv_connector_worker_meta is not None:
            self._has_stats = self._has_events = True
            self.scheduler.update_connector_output(connector_output)
            if self._awaits_figures and connector_output.kv_connector_worker_meta.figures:
                self._awaits_figures = False
                self.scheduler.adapter.stats.publish_all()

    def take_events(self) -> Iterable[Any]:
        """Return what was stored and removed since the last call."""
        had_events, self._has_events = self._has_events, False
        if had_events and not self._publishes:
            self.scheduler.adapter.manager.take_events()  # a message a chunk takes long to make
            return ()
        return self.scheduler.take_events() if had_events else ()

    def reset_cache(self) -> bool | None:
        self._has_stats = self._has_events = True
        return bool(super().reset_cache())

    def weights_may_have_changed(self, cause: str) -> None:
        """Let nothing of before be loaded, and nothing of before be stored any more.

        Args:
            cause: the call to the workers, for people.
        """
        half = self.connector_scheduler
        if half.settings.fixed_weights:
            return
        if not half.generations.has_new_weights:
            log.warning(
                "kvoffload: %s may have changed the weights: tiers load nothing of before, and "
                "what is stored from now on is found by this engine alone. Where no such call "
                'changes weights, set "fixed_weights": true.',
                cause,
            )
        half.generations.has_new_weights = True
        self.reset_cache()

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Before each step; see the worker half.

        With drafts, vLLM's Model Runner V1 ends a step on the last stage of a pipeline alone.
        """
        if self._connector_metadata is not None:
            self.wait_for_save()
            self.clear_connector_metadata()
        self.connector_worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._connector_metadata is not IDLE_STEP:
            self.connector_worker.start_kv_transfers(self._connector_metadata)

    def wait_for_save(self) -> None:
        """Take in the stores of this step; they begin in the next."""
        if self._connector_metadata is not IDLE_STEP:
            self.connector_worker.prepare_store_kv(self._connector_metadata)

    def unregister_kv_caches(self) -> None:
        """See :meth:`KVOffloadWorker.unregister_kv_caches`; vLLM calls it from 0.33 on."""
        self.connector_worker.unregister_kv_caches()

    def shutdown(self) -> None:
        if self.connector_scheduler is not None:
            self.connector_scheduler.operators.close()
        super().shutdown()

    # ---- failures ----

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose loads ended, and which of them must be computed after all."""
        if self.connector_worker is None:
            return super().get_transfer_results(finished_req_ids)
        sent, received = self.connector_worker.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=self.connector_worker.take_failed_requests(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that a load should have filled and did not."""
        return self.connector_worker.take_failed_blocks() if self.connector_worker else set()

    # ---- statistics ----

    def get_kv_connector_stats(self) -> Any:
        """Return the scheduler half's statistics; None if it did nothing since the last call.

        vLLM asks once at the end of each step.
        """
        if self.connector_scheduler is not None:
            self.connector_scheduler.step_ended()
            if (generations := self.connector_scheduler.generations).were_loaded:
                generations.take_loaded()
                self.weights_may_have_changed("load_weights of the model in a worker")
        had_stats, self._has_stats = self._has_stats, False
        if not had_stats:
            return None
        stats = super().get_kv_connector_stats()
        # The engine steps until all of a publication is told: each step tells the next part.
        half = self.connector_scheduler
        self._has_stats = half is not None and half.adapter.stats.is_midway
        return stats

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for blocks in one piece; vLLM drops the wish, with a warning, where it cannot."""
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        wished = wished_layout(vllm_config, settings)
        return wished or super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. Asked while the command line is read: a good moment to refuse a bad setting.

        Raises:
            ConfigError: see :func:`check_settings`.
        """
        check_settings(extra_config)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EngineStats:
        """See vLLM; for its log line."""
        return EngineStats() if data is None else EngineStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> KVConnectorPromMetrics:
        """Register our metrics and those of vLLM's connector."""
        described = copy(vllm_config)
        described.kv_transfer_config = copy(vllm_config.kv_transfer_config)
        described.kv_transfer_config.kv_connector_extra_config = {
            "spec_name": HalvesSpec.__name__,
            "spec_module_path": HalvesSpec.__module__,
        }
        return super().build_prom_metrics(
            described, metric_types, labelnames, per_engine_labelvalues
        )


def with_settings(vllm_config: Any, settings: VllmConfigSettings) -> Any:
    """Return vLLM's configuration with those of our settings that vLLM reads too.

    They may come from the environment or a file, which vLLM does not know.
    """
    config = copy(vllm_config)
    config.kv_transfer_config = transfer = copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | {
        "blocks_per_chunk": settings.blocks_per_chunk,
        "self_describing_kv_events": settings.self_describing_kv_events,
    }
    return config


def warn_of_settings(vllm_config: Any, settings: VllmConfigSettings) -> None:
    """Say loudly what will hurt: a failed load that fails its request, hashes no one else has."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        log.warning(
            "kvoffload: kv_load_failure_policy is %r: A FAILED LOAD WILL FAIL ITS REQUEST. "
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            transfer.kv_load_failure_policy,
        )
    if settings.has_tiers and not hash_root(vllm_config)[1]:
        log.warning(
            "kvoffload: prefix hashes start from a random number in each process "
            "(prefix_caching_hash_algo %r), so NOTHING STORED WILL BE FOUND after a restart or by "
            "another instance. Set --prefix-caching-hash-algo sha256.",
            vllm_config.cache_config.prefix_caching_hash_algo,
        )


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
        """Make the adapter; the manager comes when the workers are known."""
        return ManagerAdapter()

    def get_worker(self, kv_caches: VllmCaches) -> VllmWorker:
        """Never called: our worker half builds its own."""
        raise NotImplementedError
