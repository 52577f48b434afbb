"""Variables of the environment that may change a byte of the KV cache.

vLLM's code reads variables past ``vllm.envs``, and so do kernels that come with it. Those that may
change a byte of the KV cache are facts where they are set. Names belong to vLLM 0.32 and 0.33; a
test looks for new ones in the sources of the version that is installed.
"""

import os
from typing import Any

from kvoffload.connectors.configuration import OF_PRECISION, fact, names
from kvoffload.connectors.vllm import harmless_fields as harmless
from kvoffload.identity import Fact


def variables() -> dict[str, Fact]:
    """Return what vLLM reads from the environment, as it understands it."""
    from vllm import envs

    return set_elsewhere() | {
        f"env.{name}": fact(name, _variable(envs, name))
        for name in sorted(envs.environment_variables)
        if name not in harmless.VARIABLES
    }


def _variable(envs: Any, name: str) -> Any:
    try:
        return getattr(envs, name)
    except Exception as error:  # vLLM fails where it needs it; a wrong value is a value
        return f"unclear: {error}"


# ---- Past ``vllm.envs`` ----

_OF_KERNELS = (
    "AITER_", "FA_", "FLA_", "FLASHINFER_", "FLASH_ATTENTION_", "FMHA_", "INKLING_", "MINIMAX_",
    "MSA_",
)  # fmt: skip
"""What the names of variables begin with that packages of kernels read."""

_ELSEWHERE = {
    "kernels, and their precision": (
        "ARCH COMPILE_ONLY FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH FORCE_NUM_KV_SPLITS "
        "GDN_RECOMPUTE_SUPPRESS_LEVEL LAMPORT_RS_SCONV TRTLLM_DISABLE_FP4_QUANT_FAST_MATH "
        "USE_DEFAULT_FLA_NORM USE_FLAGOS VLLM_MINIMAX_M3_MSA_CUTLASS_MIN_BATCH "
        "XPU_USE_TRITON_KERNEL"
    ),
    "media are read so after their hash is made": "XHS_VIDEO_JPEG_QUALITY",
}
_HARMLESS_OF_KERNELS = {
    "where files and caches are": (
        "FLASHINFER_CUBINS_REPOSITORY FLASH_ATTENTION_CUTE_DSL_CACHE_DIR "
        "MINIMAX_KERNELS_CUTE_AOT_CACHE"
    ),
    "how kernels are compiled and kept": (
        "FLASHINFER_CUDA_ARCH_LIST FLASHINFER_DISABLE_VERSION_CHECK FLASHINFER_EXTRA_LDFLAGS "
        "FLASHINFER_JIT_DEBUG FLASHINFER_JIT_VERBOSE FLASHINFER_NVCC FLASHINFER_WORKSPACE_BASE "
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    ),
    "what is logged and measured": (
        "FA_LOG_LEVEL FMHA_GMEM_CHECK FLASHINFER_LOGDEST FLASHINFER_LOGGING_LEVEL "
        "FLASHINFER_LOGLEVEL MINIMAX_KERNELS_KVOUTER_COUNT_REPLICAS "
        "MINIMAX_KERNELS_KVOUTER_DEBUG_ARTIFACTS MINIMAX_LOG_COMPILE"
    ),
}
ELSEWHERE, HARMLESS_OF_KERNELS = names(_ELSEWHERE) | OF_PRECISION, names(_HARMLESS_OF_KERNELS)


def is_fact(name: str) -> bool:
    """Whether a variable that ``vllm.envs`` does not know counts where it is set."""
    return name in ELSEWHERE or (name.startswith(_OF_KERNELS) and name not in HARMLESS_OF_KERNELS)


def set_elsewhere() -> dict[str, Fact]:
    """Return the variables of this process that count."""
    found = {name: value for name, value in os.environ.items() if is_fact(name)}
    return {f"env.{name}": fact(name, found[name]) for name in sorted(found)}
