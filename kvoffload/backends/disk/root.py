"""What one process has open of a root: its folders, its locks, the shared quota."""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from kvoffload.backends.disk import limits as disk_limits
from kvoffload.backends.disk.limits import Limits
from kvoffload.backends.disk.locks import (
    EvictorLock,
    WriterLock,
    clean_up,
    count_alive,
    has_older,
    is_at,
    lock_patiently,
)
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.paths import BOUNDS, LEDGER, QUARANTINE, WRITERS, is_namespace
from kvoffload.backends.disk.quota import Quota
from kvoffload.backends.disk.root_checks import (
    enter_safely,
    refuse_exposed,
    refuse_other_store,
    refuse_unsafe,
    remedy_of,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.log_rate import LASTING_S, Throttle
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 2.0
ABANDONED_S = 3600.0
"""The evicting process removes a namespace folder that was empty and untouched for so long."""


class RootHandle:
    """A root, open for the namespace folder of one name. Thread-safe."""

    def __init__(
        self,
        vfs: Vfs,
        path: str,
        namespace: str,
        options: DiskOptions,
        count: Callable[[str], None],
    ) -> None:
        """Open the root, made if missing; ``count`` increments a counter.

        Raises:
            OSError: the folder cannot be used.
            ConfigError: other users could change or replace it.
        """
        self.vfs = vfs
        self.path = path
        self._folder = f"{path}/{namespace}"
        self._count = count
        self._durable = options.durability == "fsync"
        self._trust_parents = options.trust_parent_folders
        self._repairing = threading.Lock()
        self._not_made = Throttle(log, LASTING_S)
        self.refusal: str | None = None
        """Why this process loads and stores nothing at the moment; None: the root is in order."""
        self.repairs = 0
        """How often this process made removed folders again."""
        self.other_writers = 0
        """Other live writers under the root, as of the last clean-up."""
        self.has_older_writers = False
        """Whether one of them is of a version that neither finds nor counts chunks in slots."""
        with contextlib.ExitStack() as undo:
            undo.callback(vfs.leave)
            self.fresh = self._make_folders()
            """Whether the root was empty when this process opened it."""
            self._touch_folder()
            self.quota = Quota(vfs, f"{path}/{LEDGER}", fresh=self.fresh)
            undo.callback(self.quota.close)
            with self._opening_lock():
                alone = not count_alive(vfs, path)
                self.writer = WriterLock(vfs, path)
                undo.callback(self.writer.close)
                self.limits = self._agree(options.limits(), alone=alone)
                """The limits of the root, as its processes agreed on them."""
            self._look_for_older()
            self.evictor = EvictorLock(vfs, path)
            self.evictor.take()
            undo.pop_all()

    def close(self) -> None:
        self.writer.close()
        self.evictor.close()
        self.quota.close()
        self.vfs.leave()

    def maintain(self) -> None:
        """Repair what was removed, and keep the namespace folder from looking abandoned."""
        self.repair()
        with contextlib.suppress(OSError):
            self._record_again()
        with contextlib.suppress(OSError):
            age_s = time.time() - self.vfs.lstat(self._folder).st_mtime
            if age_s > ABANDONED_S / 4:
                self._touch_folder()

    def clean_up(self) -> None:
        """Remove what dead writers left, if this process evicts, and count the live ones.

        A scan between the removal and the release would take the bytes out of the quota, too.
        """
        if self.evictor.held:
            self.other_writers, freed = clean_up(self.vfs, self.path, self.writer.token)
            if freed:
                self.quota.release(freed)
        else:
            self.other_writers = count_alive(self.vfs, self.path, self.writer.token)
        self._look_for_older()

    def temporary(self, *, counted: bool = True) -> str:
        """Return a new path among the temporary files of this process."""
        return self.writer.temporary(counted=counted)

    def is_alone(self) -> bool:
        """Return whether no other process has the root open; raises OSError."""
        return count_alive(self.vfs, self.path) <= 1  # the own one counts as well

    def _look_for_older(self) -> None:
        found = has_older(self.vfs, self.path)
        if found and not self.has_older_writers:
            text = "disk %s: an older version has it open: until it ends, small chunks are files"
            log.warning(text, self.path)
        self.has_older_writers = found

    def repair(self) -> bool:
        """Make removed folders and shared files again; return whether any was missing.

        A root that was emptied under a running process is an empty root, no error.
        """
        with self._repairing:
            try:
                if not self._is_damaged():
                    self._allow()
                    return False
                fresh = self._make_folders()
                if self.writer.is_gone():
                    gone, self.writer = self.writer, WriterLock(self.vfs, self.path)
                    gone.close()
                if self.evictor.is_gone():
                    self.evictor.close()
                    self.evictor.take()
                if self.quota.is_gone():
                    lost = self.quota
                    self.quota = Quota(self.vfs, f"{self.path}/{LEDGER}", fresh=fresh)
                    lost.close()
            except ConfigError as error:
                self._refuse(str(error))
                return False
            except OSError as error:
                self._count("remake_failed")
                text = "disk %s: removed folders cannot be made again: %s; %s"
                self._not_made.warning(text, self.path, error, remedy_of(error))
                return False
            self._allow()
            self.repairs += 1
        self._count("remade")
        log.warning("disk %s: folders had been removed and were made again", self.path)
        return True

    def _make_folders(self) -> bool:
        """Make root and namespace folder, and enter the root; return whether it was empty.

        Raises:
            ConfigError: the root is a symbolic link or belongs to another user, or other users may
                write it. Unless parents are trusted, the same holds for folders above it.
            OSError: the root cannot be made or written.
        """
        vfs, path = self.vfs, self.path
        if not self._trust_parents:
            refuse_exposed(vfs, path)
        _make_parents(os.path.dirname(path))
        vfs.make_folder(path, durable=self._durable)
        refuse_unsafe(path, vfs.lstat(path))
        enter_safely(vfs, path, trust_parents=self._trust_parents)
        names = vfs.listdir(path)
        refuse_other_store(path, names)
        for inner in (f"{path}/{WRITERS}", f"{path}/{QUARANTINE}"):
            vfs.make_folder(inner)
            refuse_unsafe(inner, vfs.lstat(inner))
        fresh = not any(map(is_namespace, names))
        vfs.make_folder(self._folder, durable=self._durable)
        refuse_unsafe(self._folder, vfs.lstat(self._folder))
        return fresh

    def _refuse(self, reason: str) -> None:
        """Load and store nothing until the folder is in order."""
        self._count("remake_failed")
        if self.refusal != reason:
            log.error("disk: nothing is loaded or stored until this is set right: %s", reason)
        self.refusal = reason

    def _allow(self) -> None:
        if self.refusal is not None:
            log.warning("disk %s: the folder is in order again, and in use", self.path)
        self.refusal = None

    @contextlib.contextmanager
    def _opening_lock(self) -> Iterator[None]:
        """Open a root in one process at a time.

        A process that finds no other sets the limits; two at once would both do so. The wait ends,
        because a stopped process may hold the lock for ever.
        """
        with self.vfs.file(self.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            with contextlib.suppress(OSError):  # a file system without locks on folders
                lock_patiently(_LOCK_WAIT_S, self.vfs.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def _agree(self, wanted: Limits, *, alone: bool) -> Limits:
        """Return the limits in force: those of the only process, else those recorded."""
        try:
            recorded = disk_limits.read(self.vfs, self.path)
        except ValueError as error:
            log.warning("disk: %s/%s is ignored: %s", self.path, BOUNDS, error)
            recorded = None
        if recorded is not None and not alone:
            disk_limits.warn_of_difference(self.path, wanted, recorded)
            return recorded
        if recorded != wanted:
            try:
                self._record(wanted)
            except OSError as error:
                log.warning("disk: cannot write %s/%s: %s", self.path, BOUNDS, error.strerror)
        disk_limits.log_change(self.path, recorded, wanted, self.quota.resident_bytes)
        return wanted

    def _record(self, limits: Limits) -> None:
        disk_limits.save(self.vfs, self.path, f"{self.writer.folder}/{BOUNDS}", limits)

    def _record_again(self) -> None:
        """Record the limits of the root if their file is gone or damaged; raises OSError.

        Otherwise the next engine that opens the root would set its own. Only the evicting process
        replaces a file, so that two versions do not replace each other's for ever.
        """
        try:
            recorded = disk_limits.read(self.vfs, self.path)
        except ValueError as error:
            if self.evictor.held:
                self._record(self.limits)
                log.warning("disk: %s/%s is recorded again: %s", self.path, BOUNDS, error)
            return
        if recorded is None:
            self._record(self.limits)

    def _touch_folder(self) -> None:
        """Refresh the folder's mtime: it tells other processes that this one is alive."""
        now_ns = time.time_ns()
        with contextlib.suppress(OSError):
            self.vfs.utime(self._folder, now_ns, now_ns)

    def _is_damaged(self) -> bool:
        """Return whether a part is gone or another folder; ConfigError: a folder is not safe."""
        vfs = self.vfs
        if not is_at(vfs, vfs.root_fd, self.path):
            return True
        refuse_unsafe(self.path, vfs.fstat(vfs.root_fd))
        if any(part.is_gone() for part in (self.writer, self.evictor, self.quota)):
            return True
        try:
            for folder in (self._folder, f"{self.path}/{WRITERS}", f"{self.path}/{QUARANTINE}"):
                refuse_unsafe(folder, vfs.lstat(folder))
        except FileNotFoundError:
            return True
        return False


def _make_parents(folder: str) -> None:
    """Make missing folders above the root: for the owner to write, whatever the umask."""
    if not os.path.isdir(folder):
        _make_parents(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755)
