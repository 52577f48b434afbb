"""The optional packages that settings need."""

from importlib import import_module
from typing import Any

from kvoffload.errors import ConfigError

_NEEDED = {
    "metrics_port": ("prometheus_client", "metrics"),
    "otel_spans": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel"),
    "secret_file": ("blake3", "blake3"),
    "url": ("obstore", "object"),
    "folder": ("aiofiles.os", "folder"),
    "encryption": ("cryptography.hazmat.primitives.ciphers.aead", "encryption"),
}
"""Setting, or the type of a tier → module, and the extra that has it."""


def check_extra(setting: str, value: Any, where: str = "") -> None:
    """Import what a setting needs; ``where`` prefixes its name in the error.

    Raises:
        ConfigError: it is not installed.
    """
    module, extra = _NEEDED[setting]
    try:
        import_module(module)
    except ImportError as error:
        remedy = f"needs its extra: pip install '/path/to/kvoffload[{extra}]' ({error})"
        raise ConfigError(f"{where}{setting}", value, remedy) from error
