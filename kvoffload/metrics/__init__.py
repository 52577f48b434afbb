"""Metrics: their names, the registry that counts, and the pages made from it.

The modules of the package that the engine's threads use load no library for a page.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Exporter":
        raise AttributeError(f"module 'kvoffload.metrics' has no attribute {name!r}")
    return import_module("kvoffload.metrics.exporter").Exporter
