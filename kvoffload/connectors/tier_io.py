"""Host memory that chunks pass through, and the I/O server between it and the tiers."""

import logging
import os
from collections.abc import Mapping

from kvoffload import registry
from kvoffload.config import BackendConfig, OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.identity import Fact, namespace, readable, short
from kvoffload.io.attached import AttachedServer
from kvoffload.io.client import IOClient
from kvoffload.io.forms import Form, ServerProcess, ServerThread, check_interpreter
from kvoffload.io.protocol import VERSION, Open, TierSettings, tiers_of
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)
_NO_PROCESS = (
    "kvoffload: no I/O process can be started: %s. A thread of this process serves the tiers, so "
    "steps take longer while chunks load."
)


SERVE = "serve"
"""The name of the tier that a server of the host is."""


def tier_names(config: OffloadConfig) -> list[tuple[str, BackendConfig]]:
    """Name each configured tier; see :func:`kvoffload.io.protocol.tiers_of`."""
    if config.serve:
        return [(SERVE, BackendConfig(SERVE))]
    names = (tier.name for tier in tiers_of(config.backends))
    return list(zip(names, config.backends, strict=True))


class TierIO:
    """A slab, and the client of an I/O server that serves its slots; its maker closes it.

    Args:
        config: the settings.
        num_slots: of the slab.
        slot_bytes: of a slot.
        chunk_bytes: of the largest chunk.
        facts: everything that decides what the bytes mean; see :mod:`kvoffload.identity`.

    Raises:
        ConfigError: a tier cannot be opened, or there is not that much memory.
    """

    def __init__(
        self,
        config: OffloadConfig,
        num_slots: int,
        slot_bytes: int,
        chunk_bytes: int,
        facts: Mapping[str, Fact],
    ) -> None:
        self.client: IOClient | None = None
        """None if there are no tiers."""
        self._config = config
        self._facts = dict(facts)
        self._opening = (chunk_bytes, slot_bytes)
        self._fd: int | None = None
        setting, _ = config.host_memory
        if config.serve:
            self._attach(num_slots, slot_bytes)
            return
        if config.backends and config.io == "process":
            try:
                check_interpreter()
                self._fd = fd = create_shared_memory(num_slots * slot_bytes, setting)
                self.slab = Slab(num_slots, slot_bytes, fd)
                self._start(lambda: ServerProcess(fd))
                return
            except OSError as error:
                log.warning(_NO_PROCESS, error)
            except BaseException:
                self.close()
                raise
            self.close()
        self.slab = slab = Slab(num_slots, slot_bytes, setting=setting)
        if config.backends:
            self._start(lambda: ServerThread(slab.slot(0, slab.num_bytes)))

    def _attach(self, num_slots: int, slot_bytes: int) -> None:
        """Use the server of this host, now or when there is one."""
        path, (setting, _) = self._config.serve, self._config.host_memory
        try:
            self._fd = fd = create_shared_memory(num_slots * slot_bytes, setting)
        except OSError as error:
            raise ConfigError(SERVE, path, f"cannot be used: {error}") from error
        try:
            self.slab = Slab(num_slots, slot_bytes, fd)
            tiers = [TierSettings(SERVE, SERVE, {}, "serve.")]
            self._open(lambda: AttachedServer(path, fd), tiers, needs_server=False)
        except BaseException:
            self.close()
            raise

    def _start(self, start: Form) -> None:
        tiers = tiers_of(self._config.backends)
        for tier in tiers:  # before anything is started
            registry.read_options(tier.type, tier.options, tier.where)
        self._open(start, tiers, needs_server=True)

    def _open(self, start: Form, tiers: list[TierSettings], *, needs_server: bool) -> None:
        config = self._config
        opening = Open(
            VERSION,
            tiers,
            self.namespace,
            readable(self._facts),
            *self._opening,
            config.lookup_timeout_s,
            hint_share=config.hint_share,
        )
        limits = config.load_timeout_s, config.store_timeout_s
        self.client = IOClient(start, opening, *limits, needs_server=needs_server)

    # ---- what the stores are opened with ----

    @property
    def namespace(self) -> str:
        """The digest that the stores were opened with."""
        return namespace(**self._facts)

    def renew(self, generation: str, timeout_s: float | None = None) -> None:
        """Give the stores a new namespace, because stored bytes no longer mean the same.

        Calls still running on the old stores end on those; they are closed in the background.

        Args:
            generation: a name for what is stored from now on, which no other start has.
            timeout_s: see :meth:`IOClient.renew`; None: does not wait.
        """
        before, is_shared = self.namespace, "generation" not in self._facts
        self._facts["generation"] = generation
        if self.client is None:
            return
        if is_shared:
            log.info(
                "reset: tiers load nothing of what they stored before, and do not erase it: %s; "
                "kvoffload gc STORE --namespace %s erases it",
                ", ".join(self.client.tiers),
                short(before),
            )
        # Only this start knows a generation's name. Other namespaces belong to replicas as well.
        forgotten = [] if is_shared else [before]
        self.client.renew(self.namespace, readable(self._facts), forgotten, timeout_s)

    def clear(self, tier: str = "", timeout_s: float | None = None) -> None:
        """Remove all chunks of this namespace from a tier, or from all.

        Until the stores are open again everything is a miss; see :attr:`IOClient.outcome`.
        """
        if self.client is not None:
            facts = readable(self._facts)
            self.client.renew(self.namespace, facts, [self.namespace], timeout_s, tier)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the stores and end the I/O server. Idempotent."""
        if self.client is not None:
            self.client.close(timeout_s)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
