"""Opens the endpoint with metrics that the settings ask for."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvoffload.config import OffloadConfig
from kvoffload.extras import check_extra
from kvoffload.metric_list import Sample

if TYPE_CHECKING:
    from kvoffload.metrics import MetricsServer


def serve_metrics(
    config: OffloadConfig, read: Callable[[], Iterable[Sample]], number: int = 0
) -> "MetricsServer | None":
    """Open an endpoint if the settings name a port.

    Args:
        config: the settings.
        read: returns the samples of a scrape, on any thread.
        number: of the worker among all; added to the port.

    Raises:
        ConfigError: nothing can listen there, or the extra ``metrics`` is not installed.
    """
    if config.metrics_port is None:
        return None
    check_extra("metrics_port", config.metrics_port)
    from kvoffload.metrics import MetricsServer

    return MetricsServer(config.metrics_host, config.metrics_port + number, read)
