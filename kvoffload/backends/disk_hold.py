"""What one process holds of a root: its folders, its locks, the shared ledger; remade if gone."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from kvoffload.backends.disk_layout import (
    LEDGER,
    QUARANTINE,
    is_namespace,
    make_folder,
    prepare_root,
    refuse_unsafe,
)
from kvoffload.backends.disk_ledger import Ledger
from kvoffload.backends.disk_writers import Ownership, Writer
from kvoffload.backends.vfs import Vfs
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

ABANDONED_S = 3600.0
"""A namespace's folder that holds nothing and that nobody touched for so long may be removed."""


class Hold:
    """A foothold under a root, for the namespace folder of one name. Thread-safe."""

    def __init__(
        self, vfs: Vfs, root: str, namespace: str, count: Callable[[str], None], *, durable: bool
    ) -> None:
        """Take it; ``count`` is told of what happened to it later.

        Raises:
            OSError: the folder cannot be used.
            ConfigError: it is a symbolic link, or others could tamper with it.
        """
        self._vfs = vfs
        self._root = root
        self._folder = f"{root}/{namespace}"
        self._count = count
        self._durable = durable
        self._remaking = threading.Lock()
        self.remakes = 0
        """How often folders that somebody removed were made anew."""
        self.fresh = self._holds_nothing()
        """Whether the root was empty when it was opened."""
        with contextlib.ExitStack() as undo:
            make_folder(vfs, self._folder, durable=durable)
            refuse_unsafe(self._folder, vfs.lstat(self._folder))
            self._stay()
            self.writer = Writer(vfs, root)
            undo.callback(self.writer.close)
            self.ownership = Ownership(vfs, root)
            self.ledger = Ledger(vfs, f"{root}/{LEDGER}", fresh=self.fresh)
            self.ownership.take()
            undo.pop_all()

    def close(self) -> None:
        """Let go of everything."""
        self.writer.close()
        self.ownership.close()
        self.ledger.close()

    def keep(self) -> None:
        """Look after it, every now and then: what is gone is remade, what is idle not abandoned."""
        self.remake()
        with contextlib.suppress(OSError):
            age_s = time.time() - self._vfs.lstat(self._folder).st_mtime
            if age_s > ABANDONED_S / 4:
                self._stay()

    def remake(self) -> bool:
        """Make anew what somebody removed of folders and shared files; say whether it was that.

        A root that was emptied under a running process is a root with nothing in it, no error.
        """
        with self._remaking:
            try:
                if not self._is_damaged():
                    return False
                prepare_root(self._vfs, self._root, durable=self._durable)
                fresh = self._holds_nothing()
                make_folder(self._vfs, self._folder, durable=self._durable)
                if self.writer.is_gone():
                    self.writer.move()
                if self.ownership.is_gone():
                    self.ownership.close()
                    self.ownership.take()
                if self.ledger.is_gone():
                    self.ledger.reopen(fresh=fresh)
            except (OSError, ConfigError) as error:
                self._count("remake_failed")
                log.warning("disk %s: folders are gone and cannot be made: %s", self._root, error)
                return False
            self.remakes += 1
        self._count("remade")
        log.warning("disk %s: folders had been removed, made anew", self._root)
        return True

    def _stay(self) -> None:
        """Let the folder look lived in: who holds no chunk of it for long is alive all the same."""
        now_ns = time.time_ns()
        with contextlib.suppress(OSError):
            self._vfs.utime(self._folder, now_ns, now_ns)

    def _is_damaged(self) -> bool:
        if any(part.is_gone() for part in (self.writer, self.ownership, self.ledger)):
            return True
        try:
            for folder in (self._folder, f"{self._root}/{QUARANTINE}"):
                self._vfs.lstat(folder)
        except FileNotFoundError:
            return True
        return False

    def _holds_nothing(self) -> bool:
        return not any(map(is_namespace, self._vfs.listdir(self._root)))
