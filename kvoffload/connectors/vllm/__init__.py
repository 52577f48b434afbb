"""Attach to vLLM: ``"kv_connector": "KVOffloadConnector"``.

``docs/guides/vllm.md`` has the command line. Names are imported at their first use. So an unknown
vLLM is refused with a sentence, not with a traceback.
"""

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvoffload.connectors.vllm.start import check_lookups, explained, watch_configurations

if TYPE_CHECKING:
    from kvoffload.connectors.vllm.connector import KVOffloadConnector

__all__ = ["KVOffloadConnector", "register"]


def register() -> None:
    """Make the connector known to vLLM by its name, and check its settings early.

    vLLM calls this in each of its processes, by the entry-point group ``vllm.general_plugins``.
    ``MultiConnector`` finds the class of a connector's statistics by name only.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector("KVOffloadConnector", __name__, "KVOffloadConnector")
    check_lookups()
    watch_configurations()


def __getattr__(name: str) -> Any:
    if name != "KVOffloadConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with explained(name):
        found = import_module(f"{__name__}.connector").KVOffloadConnector
        register()  # for a process in which plug-ins are switched off
        return found
