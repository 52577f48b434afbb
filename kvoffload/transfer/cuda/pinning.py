"""Pins host memory for a GPU, portion by portion, while the engine starts.

Registering memory takes some tenths of a second for each gigabyte, with locks of the driver. A
thread therefore registers it in portions, without the GIL, while the engine starts and serves.
A transfer whose slots are not pinned yet lets later ones pass, and is launched when they are.

``RLIMIT_MEMLOCK`` is not checked beforehand: NVIDIA's driver pins pages itself and does not count
them against it, so a container's usual 8 MiB would refuse what works. The warning names it if
registering fails.
"""

import logging
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvoffload.config import human_bytes
from kvoffload.io.lent_memory import LentMemory
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

PORTION_BYTES = 64 << 20
"""Registered at once. An H100's driver holds its locks for 21 ms for 256 MiB: a step waited 10."""
PROGRESS_S = 5.0
"""Time between two log lines about progress."""
CLOSE_TIMEOUT_S = 10.0
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Before each further try of a portion. What made CUDA refuse it may pass: the capture of a graph,
or a shortage of memory."""


Pinnable = Slab | LentMemory


class Pinning:
    """Pins host memory in the background; :meth:`close` unpins it.

    Args:
        memory: kept until it is unpinned.
        register: pins ``(address, length)``; raises if it cannot. Runs on the pinning thread.
        unregister: unpins the portion at an address. Runs on that thread too.
        portion_bytes: how much is registered at once; whole pages.
    """

    def __init__(
        self,
        memory: Pinnable,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        portion_bytes: int = PORTION_BYTES,
    ) -> None:
        self.address = memory.address
        self.pinned_bytes = 0
        """So many bytes from the start on are pinned."""
        self.error: Exception | None = None
        """Why the rest is not pinned. Copies of it work, slowly."""
        self._register = register
        self._unregister = unregister
        self.portion_bytes = portion_bytes
        """Where a multiple of this lies, a copy must be cut."""
        self._is_stopping = self._is_closing = False
        self._progress = threading.Condition()
        # The thread alone keeps the memory: that of a server is unmapped with its last user.
        self._thread = threading.Thread(
            target=self._run, args=(memory,), name="kvoffload-pin", daemon=True
        )
        self._thread.start()

    def _run(self, memory: Pinnable) -> None:
        self._pin_all(memory)
        with self._progress:
            self._progress.wait_for(lambda: self._is_closing)
        self._unpin_all()

    def _pin_all(self, memory: Pinnable) -> None:
        total, took_s = memory.num_bytes, 0.0
        logged_s = time.monotonic()
        for start in range(0, total, self.portion_bytes):
            length = min(self.portion_bytes, total - start)
            if not self._await_use(start):
                return
            begun_s = time.monotonic()
            try:
                if not self._pin(memory, start, length):
                    return
            except Exception as error:
                self._give_up(memory, error, start)
                return
            self.pinned_bytes += length
            took_s += time.monotonic() - begun_s
            if time.monotonic() - logged_s > PROGRESS_S:
                logged_s = time.monotonic()
                done = human_bytes(start + length)
                log.info("%s: %s of %s pinned", memory.name, done, human_bytes(total))
        log.info("%s: %s pinned in %.1f s", memory.name, human_bytes(total), took_s)

    def _await_use(self, start: int) -> bool:
        """Wait until the portion is to be pinned; False if no further one is."""
        with self._progress:
            self._progress.wait_for(lambda: self._is_used(start) or self._is_stopping)
            return not self._is_stopping

    def _is_used(self, start: int) -> bool:
        """Whether the portion that begins here is to be pinned yet."""
        return True

    def _pin(self, memory: Pinnable, start: int, length: int) -> bool:
        """Pin a portion, in several tries if need be; False if the copier was closed meanwhile."""
        memory.populate(start, length)
        address = self.address + start
        for pause_s in PAUSES_S:
            try:
                self._register(address, length)
                return True
            except Exception as error:
                log.info("%s: a portion is not pinned yet (%s); trying again", memory.name, error)
            with self._progress:
                if self._progress.wait_for(lambda: self._is_stopping, pause_s):
                    return False
        self._register(address, length)
        return True

    def _give_up(self, memory: Pinnable, error: Exception, start: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        memlock = "unlimited" if limit == resource.RLIM_INFINITY else human_bytes(limit)
        log.warning(
            "%s: only %s of %s could be pinned (%s); the rest is copied more slowly. "
            "RLIMIT_MEMLOCK is %s; NVIDIA's driver does not count pinned memory against it, "
            "sandboxes may: see ulimit -l",
            memory.name,
            human_bytes(start),
            human_bytes(memory.num_bytes),
            error,
            memlock,
        )
        # Its frames have the memory, and this object: nothing of a server would be unmapped.
        self.error = error.with_traceback(None)

    def _unpin_all(self) -> None:
        """Unpin, on the thread that pinned: it has the device's context."""
        for start in range(0, self.pinned_bytes, self.portion_bytes):
            address = self.address + start
            try:
                self._unregister(address)
            except Exception as error:
                log.warning("host memory at %d could not be unpinned: %s", address, error)
        self.pinned_bytes = 0

    def is_settled(self, end: int) -> bool:
        """Whether bytes up to ``end`` are pinned, or will not be; never blocks."""
        return self.pinned_bytes >= end or self.error is not None or self._is_stopping

    def stop(self) -> None:
        """Pin no more; every byte is settled from now on."""
        with self._progress:
            self._is_stopping = True
            self._progress.notify_all()

    def begin_unpinning(self) -> None:
        """Begin to unpin all; never waits. No copy may run any more."""
        with self._progress:
            self._is_stopping = self._is_closing = True
            self._progress.notify_all()

    def close(self, timeout_s: float | None = None) -> None:
        """Unpin all, in the background if it takes longer; no copy may run any more."""
        self.begin_unpinning()
        self._thread.join(CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        if self._thread.is_alive():  # it keeps the memory, so nothing is freed too early
            log.warning("host memory is still pinned after %.0f s; left alone", CLOSE_TIMEOUT_S)


class LentPinning(Pinning):
    """Loads from memory of a server do not wait until it is pinned: they are slower before.

    It is pinned as far as loads have reached. Pinning the rest would take memory from the system,
    on this engine's account, that the server has not used yet.
    """

    takes_batches = True
    _used_bytes = 0

    def use(self, end: int) -> None:
        """Let it be pinned up to here."""
        with self._progress:
            if end > self._used_bytes:
                self._used_bytes = end
                self._progress.notify_all()

    def _is_used(self, start: int) -> bool:
        return start < self._used_bytes

    def is_settled(self, end: int) -> bool:
        return True


def numa_node_of(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of a device such as ``0000:3b:00.0``; None if it is not known."""
    try:
        node = int((devices / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
