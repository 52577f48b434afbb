"""Prints why tests and benchmarks for a GPU cannot run here; exits with 1 then."""

import importlib
import sys


def reason() -> str:
    """Return the missing requirement; empty if all are met."""
    for module in ("torch", "numpy", "msgspec"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{module} cannot be imported ({error})"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return "" if (major, minor) >= (2, 6) else f"torch {torch.__version__} is older than 2.6"


if __name__ == "__main__":
    if missing := reason():
        print(f"skipped: {missing}")
        sys.exit(1)
