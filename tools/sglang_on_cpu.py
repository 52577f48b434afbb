"""Makes an environment with a SGLang that is published for CUDA only, to test with on a CPU.

``sglang_on_cpu.py TARGET``: TARGET is a new virtual environment with SGLang's wheel, torch for
CPUs, and those of its requirements that an engine on a CPU imports. What stands for its CUDA
kernels and copies is in ``tests/engines/sglang_engine/stubs``; each process imports it first.
"""

import subprocess
import sys
from pathlib import Path

from vllm_on_cpu import pip

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "tests" / "engines" / "sglang_engine" / "stubs"
SGLANG = "sglang==0.5.23"
TORCH = "torch==2.13.0"
"""The same as in constraints.txt: a plain build that runs everywhere."""
ALONE = (
    SGLANG, "torchvision==0.28.0", "triton", "xgrammar", "llguidance", "outlines==0.1.11",
    "modelscope", "timm", "kernels", "nvidia-ml-py", "soundfile", "cffi", "mistral_common",
    "torch_memory_saver",
)  # fmt: skip
"""Packages whose own requirements are CUDA builds, or are not imported."""
NEEDED = (
    TORCH, "numpy", "transformers==5.19.0", "fastapi", "uvicorn>=0.51", "uvloop", "orjson",
    "pyzmq", "msgspec", "aiohttp", "psutil", "setproctitle", "partial_json_parser",
    "prometheus-client", "pydantic", "python-multipart", "requests", "tqdm", "xxhash", "zstandard",
    "pybase64", "IPython", "interegular", "compressed-tensors==0.18.0", "einops", "packaging",
    "pillow", "sentencepiece", "tiktoken", "scipy", "anthropic", "openai==2.8.0",
    "openai-harmony==0.0.4", "py-spy", "watchfiles", "distro", "easydict", "blobfile", "gguf",
    "numba==0.65.1", "apache-tvm-ffi==0.1.11", "datasets", "ninja", "jsonschema", "outlines_core",
    "pycountry", "referencing", "diskcache", "lark", "nest_asyncio", "cloudpickle",
    "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "redis",
)  # fmt: skip


def main(target: Path) -> None:
    """Make the environment; what was there is replaced."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", target], check=True)
    python = target / "bin" / "python"
    pip(python, "install", "--no-deps", *ALONE)  # it warns of the requirements that are left out
    pip(python, "install", *NEEDED)
    pip(python, "install", "--no-deps", "-e", str(ROOT))
    (packages,) = target.glob("lib/python3*/site-packages")
    (packages / "sglang_on_cpu.pth").write_text(f"{STUBS}\nimport sglang_on_cpu\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
