"""Pins the slab for a GPU, portion by portion, while the engine starts.

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


class Pinning:
    """Pins a slab in the background; :meth:`close` unpins it.

    Args:
        slab: the memory, which must outlive this object.
        register: pins ``(address, length)``; raises if it cannot. Runs on the pinning thread.
        unregister: unpins the portion at an address. Runs on that thread too.
        numa_node: the node for the pages, if it is known.
        portion_bytes: how much is registered at once; whole pages.
    """

    def __init__(
        self,
        slab: Slab,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        numa_node: int | None = None,
        portion_bytes: int = PORTION_BYTES,
    ) -> None:
        self.pinned_bytes = 0
        self.error: Exception | None = None
        """Why the rest is not pinned. Copies of it work, slowly."""
        self._slab = slab
        self._register = register
        self._unregister = unregister
        self.portion_bytes = portion_bytes
        self._is_stopping = self._is_closing = False
        self._progress = threading.Condition()
        slab.keep_from_forks()
        if numa_node is not None:
            slab.prefer_node(numa_node)
        self._thread = threading.Thread(target=self._run, name="kvoffload-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._pin_all()
        with self._progress:
            self._progress.wait_for(lambda: self._is_closing)
        self._unpin_all()

    def _pin_all(self) -> None:
        total, begun_s = self._slab.num_bytes, time.monotonic()
        logged_s = begun_s
        for start in range(0, total, self.portion_bytes):
            length = min(self.portion_bytes, total - start)
            try:
                if not self._pin(start, length):
                    return
            except Exception as error:
                self._give_up(error, start)
                return
            with self._progress:
                self.pinned_bytes += length
                if self._is_stopping:
                    return
            if time.monotonic() - logged_s > PROGRESS_S:
                logged_s = time.monotonic()
                done = human_bytes(start + length)
                log.info("host memory: %s of %s pinned", done, human_bytes(total))
        log.info("host memory: %s pinned in %.1f s", human_bytes(total), time.monotonic() - begun_s)

    def _pin(self, start: int, length: int) -> bool:
        """Pin a portion, in several tries if need be; False if the copier was closed meanwhile."""
        self._slab.populate(start, length)
        address = self._slab.address + start
        for pause_s in PAUSES_S:
            try:
                self._register(address, length)
                return True
            except Exception as error:
                log.info("host memory: a portion is not pinned yet (%s); trying again", error)
            with self._progress:
                if self._progress.wait_for(lambda: self._is_stopping, pause_s):
                    return False
        self._register(address, length)
        return True

    def _give_up(self, error: Exception, start: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        memlock = "unlimited" if limit == resource.RLIM_INFINITY else human_bytes(limit)
        log.warning(
            "cpu_bytes: only %s of %s could be pinned (%s); the rest is copied more slowly. "
            "RLIMIT_MEMLOCK is %s; NVIDIA's driver does not count pinned memory against it, "
            "sandboxes may: see ulimit -l",
            human_bytes(start),
            human_bytes(self._slab.num_bytes),
            error,
            memlock,
        )
        self.error = error

    def _unpin_all(self) -> None:
        """Unpin, on the thread that pinned: it has the device's context."""
        first = self._slab.address
        for start in range(0, self.pinned_bytes, self.portion_bytes):
            try:
                self._unregister(first + start)
            except Exception as error:
                log.warning("host memory at %d could not be unpinned: %s", first + start, error)
        self.pinned_bytes = 0

    def is_settled(self, end: int) -> bool:
        """Whether bytes up to ``end`` are pinned, or will not be; never blocks."""
        return self.pinned_bytes >= end or self.error is not None or self._is_stopping

    def stop(self) -> None:
        """Pin no more; every byte is settled from now on."""
        with self._progress:
            self._is_stopping = True
            self._progress.notify_all()

    def close(self) -> None:
        """Unpin all, in the background if it takes long; no copy may run any more."""
        with self._progress:
            self._is_stopping = self._is_closing = True
            self._progress.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():  # the thread keeps the slab, so nothing is freed too early
            log.warning("host memory is still pinned after %.0f s; left alone", CLOSE_TIMEOUT_S)


def numa_node_of(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of a device such as ``0000:3b:00.0``; None if it is not known."""
    try:
        node = int((devices / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
