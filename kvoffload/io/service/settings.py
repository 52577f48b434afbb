"""Settings of ``kvoffload serve``."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvoffload import registry
from kvoffload.config import (
    BackendConfig,
    Bytes,
    ByteSize,
    check_metrics_port,
    check_share,
    check_socket_path,
    convert,
    read_tiers,
)
from kvoffload.errors import ConfigError
from kvoffload.extras import check_extra
from kvoffload.io.service.host_chunk import BLOCK


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``kvoffload serve`` is started with. Read it with :func:`read_serve_config`."""

    socket: str
    """Where engines attach: an absolute path. With systemd's socket activation, the unit's."""
    memory: Bytes
    """Memory for chunks of all engines, each rounded up to whole blocks of 16 KiB."""
    policy: str = "handicap"
    """Which chunks leave the memory first; a name of the ``kvoffload.policies`` group."""
    tenant_share: float = 1.0
    """The part of the memory's chunks that one tenant may have while there must be room for more. A
    tenant above it evicts its own chunks first. Needs ``tenants`` of the engines."""
    namespace_min: Bytes = ByteSize(0)
    """Memory that the chunks of each namespace keep, while an engine of it is attached and another
    namespace has more than this."""
    namespace_max: Bytes | None = None
    """Memory that the chunks of each namespace take at most; all of it by default."""
    lend: bool = True
    """Whether engines that can do so map the memory, to read, and load straight from it. With
    ``false`` the memory is private: in large pages also where shared memory gets none. No engine
    can then read chunks whose keys it does not know."""
    backends: tuple[BackendConfig, ...] = ()
    """Stores below the memory, the nearest first, as in an engine's settings."""
    metrics_port: int | None = None
    """A port for an HTTP endpoint with metrics for Prometheus; needs the extra ``metrics``."""
    metrics_host: str = "127.0.0.1"
    """The address of that endpoint, which has no password."""

    def __post_init__(self) -> None:
        check_socket_path("socket", self.socket)
        check_metrics_port(self.metrics_port)
        if self.memory < BLOCK:
            raise ConfigError("memory", int(self.memory), f"must be at least {BLOCK} bytes")
        check_share(self.tenant_share)
        if self.namespace_max is not None and not BLOCK <= self.namespace_max <= self.memory:
            remedy = f"must be at least {BLOCK} bytes, and at most memory"
            raise ConfigError("namespace_max", int(self.namespace_max), remedy)
        most = self.memory if self.namespace_max is None else self.namespace_max
        if self.namespace_min > most:
            remedy = "must be at most memory, and at most namespace_max"
            raise ConfigError("namespace_min", int(self.namespace_min), remedy)


def read_serve_config(raw: Mapping[str, Any]) -> ServeConfig:
    """Read the settings of a server; no store is opened.

    Raises:
        ConfigError: an unknown key, a bad value, no such policy or backend.
    """
    config = convert({**raw, "backends": read_tiers(raw)}, ServeConfig)
    if config.metrics_port:
        check_extra("metrics_port", config.metrics_port)
    registry.load(registry.POLICIES, config.policy, "policy")
    registry.check_tiers(config.backends)
    return config
