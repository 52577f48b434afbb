"""Which weights vLLM loads: those of a folder or of a commit, or some that nothing tells."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kvoffload.connectors.hf_config import names_other_weights
from kvoffload.connectors.weights import was_changed, weights_identity
from kvoffload.identity import Fact

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
    was_read = reads_files(model, loading) and not was_changed(model.model, process_begun_ns())
    is_dummy = loading is not None and str(loading.load_format) == "dummy"
    return weights_identity(
        weights_id,
        model.model,
        model.revision,
        reads_files=was_read,
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
