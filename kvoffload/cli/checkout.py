"""Finds the examples and benchmarks: beside the package in a checkout, inside it in a wheel."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import kvoffload

_PACKAGE = Path(kvoffload.__file__).parent
_FOLDERS = (_PACKAGE.parent, _PACKAGE / "_checkout")
"""Where ``examples`` and ``benchmarks`` are; a wheel keeps the folders of a checkout."""


def example(name: str) -> ModuleType:
    """Import a package of ``examples/``."""
    return _import(name, "examples")


def benchmark(name: str) -> ModuleType:
    """Import a module of ``benchmarks/``; it has ``run() -> dict``."""
    return _import(f"benchmarks.{name}", ".")


def benchmark_names() -> list[str]:
    """Names of the benchmarks there are."""
    harness = Path(benchmark("harness").__file__ or "")
    return sorted(path.stem for path in harness.parent.glob("*.py") if path != harness)


def _import(name: str, below: str) -> ModuleType:
    for folder in (root / below for root in _FOLDERS):
        path = folder.joinpath(*name.split("."))
        if path.is_dir() or path.with_suffix(".py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return importlib.import_module(name)
    raise SystemExit(f"kvoffload: {name} is neither in {_FOLDERS[0]} nor in {_FOLDERS[1]}")
