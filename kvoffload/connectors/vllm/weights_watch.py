"""Weights that change while the engine runs: what was stored before is not what it computes now.

vLLM updates weights by a call to all workers (``collective_rpc``), under a name of its own or of a
plug-in, and tells no connector. So each call that is not known to leave them as they are begins a
new generation of the tiers. The namespace of the start keeps the chunks of the start's weights.

Trainers that share a process or a device with a worker load weights past the engine core. They call
``load_weights`` of the model, which each worker counts.
"""

import logging
import uuid
from collections.abc import Iterator
from functools import wraps
from typing import Any

from kvoffload.connectors.configuration import names

log = logging.getLogger(__name__)

HARMLESS_CALLS = names(
    {
        "adapters; block hashes tell them apart": "add_lora remove_lora pin_lora list_loras",
        "they read, and write nothing but files": (
            "check_health compute_weight_checksums get_compilation_match_table "
            "get_encoder_timing_stats get_kv_cache_spec get_kv_connector_handshake_metadata "
            "get_model_inspection get_supported_kv_cache_layouts get_supported_tasks "
            "save_sharded_state save_tensorized_model supports_draft_weight_updates "
            "synchronize_device take_draft_token_ids"
        ),
        "profiles, caches of media, sizes, steps": (
            "annotate_profile profile execute_dummy_batch reset_encoder_cache reset_mm_cache "
            "release_late_interaction_query_cache update_max_model_len"
        ),
        "before and after an update": (
            "init_weight_transfer_engine shutdown_weight_transfer_engine"
        ),
    }
)
"""Calls to vLLM's workers that change no weight; any other may."""


_OURS = "_kvoffload_watches"


def watch_weights() -> None:
    """Let the engine tell its connectors of calls that may change weights. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    call, reset = EngineCore.collective_rpc, Scheduler.reset_prefix_cache
    if hasattr(call, _OURS):  # and not __wrapped__: another plug-in may have wrapped it
        return

    @wraps(call)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(core, method, *args, **kwargs)
        finally:  # a call that failed may have changed some
            name = method if isinstance(method, str) else getattr(method, "__name__", "code")
            if name not in HARMLESS_CALLS or not isinstance(method, str):
                for connector in our_connectors(getattr(core, "scheduler", None)):
                    connector.weights_may_have_changed(name)

    @wraps(reset)
    def reset_prefix_cache(
        scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> Any:
        # What was computed between the update and this reset may depend on older KV.
        generations = [connector.scheduler.generations for connector in our_connectors(scheduler)]
        reset_connector |= any(each.has_new_weights for each in generations)
        done = reset(scheduler, reset_running_requests, reset_connector)
        if done:
            for each in generations:
                each.has_new_weights = False
        return done

    setattr(collective_rpc, _OURS, True)
    EngineCore.collective_rpc = collective_rpc
    Scheduler.reset_prefix_cache = reset_prefix_cache


class Updates:
    """Counts the calls of ``load_weights`` in a worker's process, after the model is loaded."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, model_config: Any) -> None:
        """Count the calls of one model's class from now on. Idempotent."""
        from vllm.model_executor.model_loader.utils import get_model_cls

        kind: Any = get_model_cls(model_config)
        load = getattr(kind, "load_weights", None)
        if load is None or hasattr(load, _OURS):
            return

        @wraps(load)
        def load_weights(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return load(model, *args, **kwargs)

        setattr(load_weights, _OURS, True)
        kind.load_weights = load_weights


UPDATES = Updates()
"""Those of this process."""


def our_connectors(scheduler: Any) -> Iterator[Any]:
    """Yield our connectors of a scheduler, those in a ``MultiConnector`` among them."""
    found = [getattr(scheduler, "connector", None)]
    while found:
        connector = found.pop()
        found += getattr(connector, "_connectors", ())
        if hasattr(connector, "weights_may_have_changed"):
            yield connector


class Generations:
    """The namespaces of one engine's tiers, one after the other; the first is that of its start.

    Args:
        half: our scheduler half.
    """

    def __init__(self, half: Any) -> None:
        self._half = half
        self.order: str | None = None
        """A generation that the workers are to be told of."""
        self.has_new_weights = False
        """Whether weights may have changed, and vLLM's prefix cache has not been reset since."""
        self.were_loaded = False
        """Whether a worker has counted an update that no order had told it of."""
        self._may_have_chunks = True
        self._is_wanted = False

    def take_loaded(self) -> bool:
        """Tell of an update that a worker has counted; its loads bring nothing until an order."""
        were_loaded, self.were_loaded = self.were_loaded, False
        self._may_have_chunks |= were_loaded
        return were_loaded

    def begin(self) -> None:
        """Give the tiers a new namespace, unless this one has no chunks."""
        half = self._half
        if half.tiers is None:
            self._is_wanted = True  # once the workers are known
        elif self._may_have_chunks:
            self._may_have_chunks = self._is_wanted = False
            self.order = uuid.uuid4().hex
            half.tiers.renew(self.order)
            half.adapter.ledger.replace_tiers(half.tiers.tiers)

    def met_workers(self) -> None:
        """Begin what was wanted before the workers were known."""
        if self._is_wanted:
            self.begin()

    def take_order(self, stores: bool) -> str | None:
        """Return a generation for the workers, before the stores of this step."""
        self._may_have_chunks |= stores
        order, self.order = self.order, None
        return order
