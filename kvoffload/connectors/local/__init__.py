"""Attach to an engine of one's own: :class:`LocalConnector`; ``docs/guides/your-engine.md``."""

from kvoffload.connectors.local.connector import LocalConnector
from kvoffload.connectors.local.transfers import LoadOutcome

__all__ = ["LoadOutcome", "LocalConnector"]
