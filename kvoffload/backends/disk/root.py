"""What one process holds of a root: its folders, its locks, the shared ledger; remade if gone."""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from kvoffload.backends.disk import limits as disk_bounds
from kvoffload.backends.disk.limits import Limits
from kvoffload.backends.disk.locks import EvictorLock, WriterLock, count_alive, is_at
from kvoffload.backends.disk.paths import (
    BOUNDS,
    LEDGER,
    QUARANTINE,
    WRITERS,
    is_namespace,
    make_folder,
    prepare_root,
)
from kvoffload.backends.disk.permissions import refuse_unsafe
from kvoffload.backends.disk.quota import Quota
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

_LOCK_TRIES = 200
_LOCK_PAUSE_S = 0.01
ABANDONED_S = 3600.0
"""A namespace's folder that holds nothing and that nobody touched for so long may be removed."""


class RootHandle:
    """A foothold under a root, for the namespace folder of one name. Thread-safe."""

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        namespace: str,
        bounds: Limits,
        count: Callable[[str], None],
        *,
        durable: bool,
        trust_parents: bool,
    ) -> None:
        """Take it; ``count`` is told of what happened to it later, ``bounds`` are wanted.

        Raises:
            OSError: the folder cannot be used.
            ConfigError: others could tamper with it, or replace it.
        """
        self._vfs = vfs
        self._root = root
        self._folder = f"{root}/{namespace}"
        self._count = count
        self._durable = durable
        self._prepare = partial(
            prepare_root, vfs, root, durable=durable, trust_parents=trust_parents
        )
        self._remaking = threading.Lock()
        self.refusal: str | None = None
        """Why nothing may be loaded from the root or stored in it now; None: all is well."""
        self.remakes = 0
        """How often folders that somebody removed were made anew."""
        with contextlib.ExitStack() as undo:
            undo.callback(vfs.leave)
            self._prepare()
            self.fresh = self._holds_nothing()
            """Whether the root was empty when it was opened."""
            make_folder(vfs, self._folder, durable=durable)
            refuse_unsafe(self._folder, vfs.lstat(self._folder))
            self._stay()
            self.ledger = Quota(vfs, f"{root}/{LEDGER}", fresh=self.fresh)
            undo.callback(self.ledger.close)
            with self._only_one_opens():
                alone = not count_alive(vfs, root)
                self.writer = WriterLock(vfs, root)
                undo.callback(self.writer.close)
                self.bounds = self._agree(bounds, alone=alone)
                """The limits of the root, as its processes agreed on them."""
            self.ownership = EvictorLock(vfs, root)
            self.ownership.take()
            undo.pop_all()

    def close(self) -> None:
        """Let go of everything."""
        self.writer.close()
        self.ownership.close()
        self.ledger.close()
        self._vfs.leave()

    def keep(self) -> None:
        """Look after it, every now and then: what is gone is remade, what is idle not abandoned."""
        self.remake()
        with contextlib.suppress(OSError):
            self._record_again()
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
                    self._allow()
                    return False
                self._prepare()
                fresh = self._holds_nothing()
                make_folder(self._vfs, self._folder, durable=self._durable)
                refuse_unsafe(self._folder, self._vfs.lstat(self._folder))
                if self.writer.is_gone():
                    self.writer.move()
                if self.ownership.is_gone():
                    self.ownership.close()
                    self.ownership.take()
                if self.ledger.is_gone():
                    self.ledger.reopen(fresh=fresh)
            except ConfigError as error:
                self._refuse(str(error))
                return False
            except OSError as error:
                self._count("remake_failed")
                log.warning("disk %s: folders are gone and cannot be made: %s", self._root, error)
                return False
            self._allow()
            self.remakes += 1
        self._count("remade")
        log.warning("disk %s: folders had been removed, made anew", self._root)
        return True

    def _refuse(self, reason: str) -> None:
        """Load and store nothing until the folder is in order: somebody tampers with it."""
        self._count("remake_failed")
        if self.refusal != reason:
            log.error("disk: nothing is loaded or stored until this is set right: %s", reason)
        self.refusal = reason

    def _allow(self) -> None:
        if self.refusal is not None:
            log.warning("disk %s: the folder is in order again, and in use", self._root)
        self.refusal = None

    @contextlib.contextmanager
    def _only_one_opens(self) -> Iterator[None]:
        """Let processes that open the root at once do so one after the other.

        Who finds no other alive sets the limits, and two would find that of each other. A stopped
        process may have the lock for ever, so waiting ends.
        """
        fd = self._vfs.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for _ in range(_LOCK_TRIES):
                try:
                    self._vfs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_PAUSE_S)
                except OSError:
                    break  # a file system without locks on folders
            yield
        finally:
            self._vfs.close_quietly(fd)

    def _agree(self, wanted: Limits, *, alone: bool) -> Limits:
        """The limits to go by: those wanted by the only process, else those recorded."""
        recorded = disk_bounds.load(self._vfs, self._root)
        if recorded is not None and not alone:
            disk_bounds.tell_difference(self._root, wanted, recorded)
            return recorded
        if recorded != wanted:
            try:
                self._record(wanted)
            except OSError as error:
                path = f"{self._root}/{BOUNDS}"
                log.warning("disk: cannot write %s: %s", path, error.strerror)
        disk_bounds.tell_change(self._root, recorded, wanted, self.ledger.resident_bytes)
        return wanted

    def _record(self, bounds: Limits) -> None:
        unfinished = f"{self.writer.folder}/{BOUNDS}"
        disk_bounds.save(self._vfs, self._root, unfinished, bounds)

    def _record_again(self) -> None:
        """Record the limits of the root if their file is gone or damaged; raises OSError.

        An engine that opens the root would set its own limits otherwise. Only the owner replaces a
        file, so that two versions do not replace each other's for ever.
        """
        try:
            recorded = disk_bounds.read(self._vfs, self._root)
        except ValueError as error:
            if self.ownership.held:
                self._record(self.bounds)
                log.warning("disk: %s/%s is recorded again: %s", self._root, BOUNDS, error)
            return
        if recorded is None:
            self._record(self.bounds)

    def _stay(self) -> None:
        """Let the folder look lived in: who holds no chunk of it for long is alive all the same."""
        now_ns = time.time_ns()
        with contextlib.suppress(OSError):
            self._vfs.utime(self._folder, now_ns, now_ns)

    def _is_damaged(self) -> bool:
        """Whether folders or files are gone, or the root's name leads to another folder.

        Raises:
            ConfigError: others may write a folder, or one is of another user, or a link.
        """
        vfs = self._vfs
        if not is_at(vfs, vfs.root_fd, self._root):
            return True
        refuse_unsafe(self._root, vfs.fstat(vfs.root_fd))
        if any(part.is_gone() for part in (self.writer, self.ownership, self.ledger)):
            return True
        try:
            for folder in (self._folder, f"{self._root}/{WRITERS}", f"{self._root}/{QUARANTINE}"):
                refuse_unsafe(folder, vfs.lstat(folder))
        except FileNotFoundError:
            return True
        return False

    def _holds_nothing(self) -> bool:
        return not any(map(is_namespace, self._vfs.listdir(self._root)))
