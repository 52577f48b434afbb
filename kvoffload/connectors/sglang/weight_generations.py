"""Which weights this process computes with: those of its start, or those of a later generation.

SGLang replaces weights in a running engine. It then empties its own caches, if the call asks for it
and no request runs, and tells its storage nothing. So each call that may change weights bars the
storage first. The storage begins a new generation once SGLang has emptied its caches. Until then it
loads nothing and stores nothing: pages of the earlier weights are still in SGLang's memory.
"""

import logging
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvoffload.connectors.sglang.engine_start import start_name

if TYPE_CHECKING:
    from kvoffload.connectors.sglang.page_store import PageStore

log = logging.getLogger(__name__)


class WeightGenerations:
    """Counts the changes of weights in a process, and tells its storages.

    All ranks get the calls of SGLang in the same order, so their generations have equal names.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_settled = True
        self._emptied_at: int | None = None
        """Batches that had been computed when SGLang last emptied its caches."""
        self._storages: WeakSet[PageStore] = WeakSet()
        self._lock = threading.RLock()

    @property
    def name(self) -> str | None:
        """The name of this generation, which no other start has; None for the weights of a start.

        A restart computes with the weights of the start, and must not find later ones.
        """
        return f"{start_name()} {self._count}" if self._count else None

    def attach(self, storage: "PageStore") -> None:
        """Tell a storage of changes; bar it if SGLang still has pages of earlier weights."""
        with self._lock:
            self._storages.add(storage)
            if not self._is_settled:
                storage.bar()

    def detach(self, storage: "PageStore") -> None:
        with self._lock:
            self._storages.discard(storage)

    def changing(self, what: str) -> None:
        """Bar all storages: a call will change weights, or may."""
        with self._lock:
            self._count += 1
            self._emptied_at = None
            if self._is_settled and self._storages:
                log.warning(
                    "kvoffload: %s: nothing is loaded or stored until SGLang has emptied its "
                    "caches (flush_cache of the update, or /flush_cache)",
                    what,
                )
            self._is_settled = False
            for storage in self._storages:
                storage.bar()

    def emptied(self, num_batches: int) -> None:
        """SGLang has emptied its caches, after this many batches."""
        with self._lock:
            self._emptied_at = num_batches

    def settle(self, num_batches: int) -> None:
        """Begin a generation if weights have changed, and SGLang has no page of earlier ones.

        Args:
            num_batches: computed until now.
        """
        with self._lock:
            name = self.name
            if self._is_settled or name is None or self._emptied_at != num_batches:
                return
            for storage in self._storages:
                storage.begin_generation(name)
            self._is_settled = True
            if self._storages:
                log.warning(
                    "kvoffload: new weights: pages of earlier weights are not loaded any more, and "
                    "pages of these weights are found until the restart only"
                )


WEIGHTS = WeightGenerations()
"""Those of this process."""
