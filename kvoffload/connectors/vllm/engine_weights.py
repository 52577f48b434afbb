"""Which weights vLLM computes with: what it loads, what changes later, and adapters.

vLLM loads weights of a folder or of a commit, or some that nothing tells.

It updates weights by a call to all workers (``collective_rpc``), under a name of its own or of a
plug-in, and tells no connector. So each call that is not known to leave them as they are begins a
new generation of the tiers. The namespace of the start keeps the chunks of the start's weights.
Trainers that share a process or a device with a worker load weights past the engine core. They call
``load_weights`` of the model, which each worker counts.

LoRA adapters are in block hashes: by content, where vLLM has their name and path. An adapter that
was trained again lies under its old path, and vLLM's hashes stay as they were. So the content of
its files is hashed as well. A request whose adapter nothing tells stays out of the tiers. So does
one whose files changed after they were read: the engine may have loaded either. An adapter of a hub
is told by nothing: vLLM asks for its newest commit each time it loads it.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.connectors.configuration import names
from kvoffload.connectors.hf_config import names_other_weights
from kvoffload.connectors.vllm.start import hook
from kvoffload.connectors.weights import adapter_digest, changes_of, was_changed, weights_identity
from kvoffload.identity import Fact

log = logging.getLogger(__name__)

# ---- Where weights come from ----

_READ_FILES = ("DefaultModelLoader", "RunaiModelStreamerLoader", "ShardedStateLoader")
"""vLLM's loaders that read just the files of the model's own folder, or of its commit."""
_READ_SAFETENSORS = ("fastsafetensors", "instanttensor")
_HOW_TO_READ = {"enable_multithread_load", "num_threads", "concurrency", "memory_limit"}
"""Keys of ``model_loader_extra_config`` that do not decide which weights are read."""


def weights_of(model: Any, loading: Any, weights_id: str | None, unknown: str = "") -> Fact:
    """Tell the weights of a model.

    Args:
        model: vLLM's ``ModelConfig``.
        loading: vLLM's ``LoadConfig``; None for the default.
        weights_id: the setting.
        unknown: the name of weights that nothing tells; see :func:`weights_identity`.
    """
    from vllm import envs

    # Elastic expert parallelism: the other ranks send their weights, perhaps newer than any file.
    # vLLM makes dummy ones first, and keeps the name of those.
    joins = envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
    was_read = reads_files(model, loading) and not was_changed(model.model, process_begun_ns())
    is_dummy = loading is not None and str(loading.load_format) == "dummy" and not joins
    return weights_identity(
        weights_id,
        model.model,
        model.revision,
        reads_files=was_read and not joins,
        dummy_seed=model.seed if is_dummy else None,
        unknown=unknown,
    )


def reads_files(model: Any, loading: Any) -> bool:
    """Whether weights come from just the files of the model's folder, or of its commit."""
    from vllm import envs
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if model.model_weights not in ("", model.model) or envs.VLLM_USE_MODELSCOPE:
        return False
    if names_other_weights(model.hf_config):
        return False
    if loading is None:
        return True
    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(str(loading.load_format))
    extra = loading.model_loader_extra_config or {}
    return (
        loader is not None
        and loader.__module__.startswith("vllm.model_executor.model_loader.")
        and loader.__name__ in _READ_FILES
        and isinstance(extra, dict)
        and not extra.keys() - _HOW_TO_READ
    )


def format_read(model: Any, loading: Any) -> str:
    """Tell which of the forms in a model's folder vLLM reads.

    Source: ``DefaultModelLoader._prepare_weights`` of vLLM.
    """
    wanted = "auto" if loading is None else str(loading.load_format)
    folder = Path(model.model)
    if not folder.is_dir():
        return wanted
    if wanted == "auto":
        wanted = "mistral" if any(folder.glob("consolidated*.safetensors")) else "hf"
    if wanted == "hf" and any(folder.glob("*.safetensors")):
        return "safetensors"
    return "safetensors" if wanted in _READ_SAFETENSORS else wanted


def process_begun_ns() -> int:
    """Return when this process began: files that were written since may not be those it loaded."""
    with open("/proc/self/stat", "rb") as state:
        ticks = int(state.read().rpartition(b")")[2].split()[19])  # after the name, which is free
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    # Both clocks are coarse; no weights are loaded so soon.
    return time.time_ns() - int((age_s - 0.1) * 1e9)


def name_for_all_ranks() -> str:
    """Agree with all tensor parallel ranks on a name that no restart repeats; each must call it."""
    from vllm.distributed import parallel_state

    name = uuid.uuid4().hex
    if not parallel_state.model_parallel_is_initialized():  # a worker without an engine
        return name
    return str(parallel_state.get_tp_group().broadcast_object(name, src=0))


# ---- Weights that change ----

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


def watch_weights() -> None:
    """Let the engine tell its connectors of calls that may change weights. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    hook(EngineCore, "collective_rpc", _around_call)
    hook(Scheduler, "reset_prefix_cache", _around_reset)


def _around_call(
    call: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        return call(core, method, *args, **kwargs)
    finally:  # a call that failed may have changed some
        name = method if isinstance(method, str) else getattr(method, "__name__", "code")
        if name not in HARMLESS_CALLS or not isinstance(method, str):
            for connector in our_connectors(getattr(core, "scheduler", None)):
                connector.weights_may_have_changed(name)


def _around_reset(
    reset: Callable[..., Any],
    scheduler: Any,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> Any:
    # What was computed between the update and this reset may depend on older KV.
    generations = [connector.scheduler.generations for connector in our_connectors(scheduler)]
    reset_connector |= any(each.has_new_weights for each in generations)
    done = reset(scheduler, reset_running_requests, reset_connector)
    if done:
        for each in generations:
            each.has_new_weights = False
    return done


class Updates:
    """Counts the calls of ``load_weights`` in a worker's process, after the model is loaded."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, model_config: Any) -> None:
        """Count the calls of one model's class from now on. Idempotent."""
        from vllm.model_executor.model_loader.utils import get_model_cls

        kind = get_model_cls(model_config)
        if hasattr(kind, "load_weights"):
            hook(kind, "load_weights", self._around_load)

    def _around_load(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return load(*args, **kwargs)


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

    def take_loaded(self) -> None:
        """Take in an update that a worker has counted; its loads bring nothing until an order."""
        self.were_loaded, self._may_have_chunks = False, True

    def begin(self) -> None:
        """Give the tiers a new namespace, unless this one has no chunks."""
        if self._may_have_chunks:
            self._may_have_chunks = False
            self.order = uuid.uuid4().hex
            self._half.renew_tiers(self.order)

    def take_order(self, stores: bool) -> str | None:
        """Return a generation for the workers, before the stores of this step."""
        self._may_have_chunks |= stores
        order, self.order = self.order, None
        return order


# ---- Adapters ----

_CONTENT = "_kvoffload_adapter"
"""Of a request: who read its adapter, and the digest; empty where nothing tells it."""


class _Read(NamedTuple):
    digest: str
    changes: Hashable


class Adapters:
    """The content of adapters as an engine has loaded them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str, int], _Read] = {}

    def content(self, lora: Any) -> str:
        """Return the digest of an adapter; empty where its files changed, or tell nothing."""
        with self._lock:
            known = self._read.get(name := _name(lora))
            if known is None:
                known = self._read[name] = self._digest(lora)
            elif known.digest and _changes(lora) != known.changes:
                log.warning(
                    "kvoffload: the files of adapter %s in %s changed after they were read. Its "
                    "requests stay out of all tiers until it is unloaded and loaded again.",
                    lora.lora_name,
                    lora.lora_path,
                )
                known = self._read[name] = _Read("", None)
            return known.digest

    def loads(self, lora: Any) -> None:
        """Note that the engine is about to read an adapter, or has it."""
        with self._lock:
            if lora.load_inplace:
                self._read.pop(_name(lora), None)
        self.content(lora)

    def unloaded(self, number: int) -> None:
        """Forget an adapter: the engine reads its files again when it is loaded."""
        with self._lock:
            for name in [name for name in self._read if name[2] == number]:
                del self._read[name]

    @staticmethod
    def _digest(lora: Any) -> _Read:
        before = _changes(lora)
        digest = (before is not None and adapter_digest(lora.lora_path)) or ""
        if not digest or _changes(lora) != before:
            log.warning(
                "kvoffload: nothing tells the content of adapter %s in %s, so its requests stay "
                "out of all tiers. A folder of this machine would.",
                lora.lora_name,
                lora.lora_path,
            )
            return _Read("", None)
        return _Read(digest, before)


ADAPTERS = Adapters()
"""Of this process: it outlives the function that hashes them, which a plug-in may replace."""


def _name(lora: Any) -> tuple[str, str, int]:
    return lora.lora_name, lora.lora_path, lora.lora_int_id


def _changes(lora: Any) -> Hashable:
    try:
        return changes_of(lora.lora_path)
    except OSError:
        return None


def is_told(request: Any) -> bool:
    """Whether the hashes of a request have its adapter's content, and its files are still those."""
    return next(told_of((request,)))


def told_of(requests: Iterable[Any]) -> Iterator[bool]:
    """Yield :func:`is_told` of each request; the files of an adapter are looked at once for all."""
    contents: dict[Hashable, str] = {}
    for request in requests:
        adapters, digest = vars(request).get(_CONTENT, (None, ""))
        if digest and (lora := request.lora_request):
            if (name := _name(lora)) not in contents:
                contents[name] = adapters.content(lora)
            yield contents[name] == digest
        else:
            yield not request.lora_request


def hash_adapters() -> None:
    """Let this process's block hashes have the content of adapters. Idempotent."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    theirs = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if theirs is None or hasattr(theirs, _CONTENT):
        return  # without it each request with an adapter stays out of the tiers

    @wraps(theirs)
    def with_content(request: Any) -> Any:
        keys = theirs(request)
        if not keys:
            return keys
        if _CONTENT not in vars(request):  # once: the rest of its blocks are the same adapter's
            setattr(request, _CONTENT, (ADAPTERS, ADAPTERS.content(request.lora_request)))
        _, content = vars(request)[_CONTENT]
        # Events show the second item of each key alone: a name.
        return [(*key, content) for key in keys] if content else keys

    setattr(with_content, _CONTENT, ADAPTERS)
    kv_cache_utils._gen_lora_extra_hash_keys = with_content
    hook(EngineCore, "add_lora", _around_add)
    hook(EngineCore, "remove_lora", _around_remove)


def _around_add(add: Callable[..., Any], core: Any, lora_request: Any) -> Any:
    ADAPTERS.loads(lora_request)
    added = add(core, lora_request)
    ADAPTERS.content(lora_request)  # files that changed meanwhile tell nothing
    return added


def _around_remove(remove: Callable[..., Any], core: Any, lora_id: int) -> Any:
    ADAPTERS.unloaded(lora_id)
    return remove(core, lora_id)
