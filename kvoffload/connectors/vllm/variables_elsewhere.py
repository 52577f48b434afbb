"""Variables that vLLM's code reads past ``vllm.envs``, and those of kernels that come with it.

Those that may change a byte of the KV cache are facts where they are set. Names belong to vLLM 0.32
and 0.33; a test looks for new ones in the sources of the version that is installed.
"""

import os

from kvoffload.connectors.configuration import fact, names
from kvoffload.identity import Fact

_OF_KERNELS = ("AITER_", "FA_", "FLA_", "FLASH_ATTENTION_", "FMHA_", "INKLING_", "MINIMAX_", "MSA_")
"""What the names of variables begin with that packages of kernels read."""

_FACTS = {
    "kernels, and their precision": (
        "ARCH COMPILE_ONLY FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH FORCE_NUM_KV_SPLITS "
        "GDN_RECOMPUTE_SUPPRESS_LEVEL LAMPORT_RS_SCONV TRTLLM_DISABLE_FP4_QUANT_FAST_MATH "
        "USE_DEFAULT_FLA_NORM USE_FLAGOS VLLM_MINIMAX_M3_MSA_CUTLASS_MIN_BATCH "
        "XPU_USE_TRITON_KERNEL"
    ),
    "media are read so after their hash is made": "XHS_VIDEO_JPEG_QUALITY",
}
_HARMLESS = {
    "where files and caches are": (
        "CONDA_EXE CONDA_PREFIX CRIU_CUDA_PLUGIN_DIR CUDA_PATH CUDNN_LIBRARY "
        "FLASHINFER_CUBINS_REPOSITORY FLASH_ATTENTION_CUTE_DSL_CACHE_DIR FLYDSL_RUNTIME_CACHE_DIR "
        "LD_PRELOAD LMCACHE_CONFIG_FILE MINFER_FMHA_CACHE_DIR MINIMAX_KERNELS_CUTE_AOT_CACHE "
        "MM_SPARSE_ATTN_AOT_CACHE MOONCAKE_CONFIG_PATH OUTLINES_CACHE_DIR PATH PROGRAMFILES "
        "PROMETHEUS_MULTIPROC_DIR ROCM_HOME ROCM_PATH SYSTEMROOT TORCHINDUCTOR_CACHE_DIR "
        "TORCH_EXTENSIONS_DIR TRITON_CACHE_DIR UV VLLM_PRECOMPILED_WHEEL_LOCATION WINDIR "
        "XDG_CACHE_HOME XDG_CONFIG_HOME CUTE_CUBIN_PATH CUTE_DSL_DUMP_DIR CUTE_DSL_PTXAS_PATH"
    ),
    "how kernels are compiled and kept": (
        "CUDACXX CUDA_MODULE_LOADING CUTE_DSL_KEEP_CUBIN CUTE_DSL_KEEP_PTX "
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED MM_SPARSE_ATTN_AOT_DISABLE PYTORCH_ROCM_ARCH "
        "TILELANG_CLEANUP_TEMP_FILES TORCH_COMPILE_DISABLE TORCH_CUDA_ARCH_LIST "
        "TRITON_CACHE_AUTOTUNING"
    ),
    "what is logged and measured": (
        "CUTE_DSL_PTXAS_VERBOSE DG_USE_NVIDIA_TOOLS DO_NOT_TRACK FA_LOG_LEVEL FMHA_GMEM_CHECK "
        "GPU_TRACE LLGUIDANCE_LOG_LEVEL MINIMAX_KERNELS_KVOUTER_COUNT_REPLICAS "
        "MINIMAX_KERNELS_KVOUTER_DEBUG_ARTIFACTS MINIMAX_LOG_COMPILE "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT PROTON_LAUNCH_METADATA_NOSYNC "
        "RAY_USAGE_STATS_ENABLED SAVE_TO_PYTORCH_BENCHMARK_FORMAT SKIP_COMPUTE_SANITIZER "
        "SM_TIMING TRACEPARENT TRACESTATE TRITON_PRINT_AUTOTUNING"
    ),
    "the same computation, launched or summed in another way": (
        "CUBLASLT_WORKSPACE_SIZE CUBLAS_WORKSPACE_CONFIG HIP_ONLINE_TUNING NCCL_LAUNCH_MODE "
        "VLLM_CUSTOM_ALLREDUCE_ALGO"
    ),
    "devices, processes, memory and the network": (
        "AWS_ENDPOINT_URL CCL_ATL_TRANSPORT CUDA_DEVICE_ORDER CUDA_MPS_PIPE_DIRECTORY "
        "EP_DISABLE_GIN EXA_API_KEY GPU_PINNED_MIN_XFER_SIZE HIP_VISIBLE_DEVICES HOST_IP "
        "JAX_PLATFORMS LMCACHE_FORCE_SKIP_SAVE LMCACHE_USE_UPSTREAM_MP LOCAL_WORLD_SIZE "
        "MASTER_ADDR MASTER_PORT MODELSCOPE_API_TOKEN MORI_SHMEM_HEAP_SIZE "
        "NCCL_ASYNC_ERROR_HANDLING NCCL_GRAPH_REGISTER "
        "NCCL_MAX_CTAS NCCL_NO_CACHE NCCL_RAS_ENABLE NUMEXPR_MAX_THREADS OMP_NUM_THREADS "
        "OPENAI_API_KEY PYTORCH_CUDA_ALLOC_CONF PYTORCH_NVML_BASED_CUDA_CHECK RANK RAY_ADDRESS "
        "RUNAI_STREAMER_S3_ENDPOINT TORCHINDUCTOR_COMPILE_THREADS "
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS UCX_MEMTYPE_CACHE UCX_RCACHE_MAX_UNRELEASED "
        "VLLM_CPU_SIM_MULTI_NUMA VLLM_DIST_IDENT VLLM_MORIIO_TRANSFER_TIMEOUT_S "
        "VLLM_SNAPSHOT_TIMEOUT_S WORLD_SIZE"
    ),
    "a fact of its own: what prefix hashes start from": "PYTHONHASHSEED",
}

FACTS, HARMLESS = names(_FACTS), names(_HARMLESS)


def is_fact(name: str) -> bool:
    """Whether a variable that ``vllm.envs`` does not know counts where it is set."""
    return name in FACTS or (name.startswith(_OF_KERNELS) and name not in HARMLESS)


def set_elsewhere() -> dict[str, Fact]:
    """Return the variables of this process that count."""
    found = {name: value for name, value in os.environ.items() if is_fact(name)}
    return {f"env.{name}": fact(name, found[name]) for name in sorted(found)}
