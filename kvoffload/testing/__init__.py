"""For authors of plug-ins: conformance suites to inherit, and wrappers that inject faults.

Names are imported on first use, so that importing the package needs no pytest.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.testing.backends import BackendSuite, PersistentBackendSuite, payload_of
    from kvoffload.testing.faults import FaultyBackend, Plan
    from kvoffload.testing.policies import PolicySuite

_MODULES = {
    "backends": ("BackendSuite", "PersistentBackendSuite", "payload_of"),
    "faults": ("FaultyBackend", "Plan"),
    "policies": ("PolicySuite",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

_SUITES = ("backends", "hazards", "indexes", "policies")
if "pytest" in sys.modules:
    # A failed assertion of a suite then shows its values.
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{name}" for name in _SUITES))

__all__ = [
    "BackendSuite", "FaultyBackend", "PersistentBackendSuite", "Plan", "PolicySuite", "payload_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvoffload.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
