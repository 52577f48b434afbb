"""A file a chunk: the form of all chunks but small ones, and of every chunk of older versions."""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.backends.disk.chunk_file import ChunkFiles, can_become, strangeness
from kvoffload.backends.disk.index import Name, split_name
from kvoffload.backends.disk.paths import shard_of

log = logging.getLogger(__name__)


Seen = int
"""What a reader found in place of a chunk: differs from whatever later takes the place."""


class FileDraft(NamedTuple):
    """A file among the temporary ones of this process."""

    form: "Files"
    path: str
    overwrites: bool
    """Whether an evicted chunk is overwritten."""

    def write(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> tuple[str | None, int]:
        """Write header and chunk; return why that failed, or None, and the allocated bytes."""
        reason, facts = self.form.chunks.write(
            self.path, key, chunk, overwrite=self.overwrites, tenant=tenant
        )
        return reason, 0 if facts is None else facts.st_blocks * 512

    def publish(self, name: Name) -> int:
        """Let readers see the chunk; return the bytes of the chunk that it replaced."""
        form, path = self.form, self.form.path_of(name)
        if replaced := form.allocated_bytes(name):
            try:
                # Not by the rename: another process may remove it, and release its bytes, too.
                form.vfs.unlink(path)
            except FileNotFoundError:
                replaced = 0
        try:
            form.vfs.rename(self.path, path)
        except FileNotFoundError:
            form.vfs.make_folder(os.path.dirname(path), durable=form.chunks.durable)
            form.vfs.rename(self.path, path)
        return replaced

    def retract(self, name: Name) -> None:
        """Hide a published chunk again."""
        self.form.vfs.rename(self.form.path_of(name), self.path)

    def drop(self) -> bool:
        """Free the place of a chunk that is not published; raises nothing.

        Returns False if it stays for now: the form releases its bytes later.
        """
        self.form.vfs.unlink_quietly(self.path)
        return True


class Files:
    """Chunks as files, found by their names."""

    def __init__(
        self,
        chunks: ChunkFiles,
        folder: Callable[[int], str],
        temporary: Callable[[], str],
        count: Callable[[str], None],
    ) -> None:
        """Look at nothing yet.

        ``folder`` returns that of a namespace by its number, ``temporary`` makes paths that the
        quota counts, and ``count`` increments a counter.
        """
        self.vfs = chunks.vfs
        self.chunks = chunks
        self._folder = folder
        self._temporary = temporary
        self._count = count
        self._checked: set[str] = set()
        """The shards that are folders: a check at every use would cost a system call."""

    def path_of(self, name: Name) -> str:
        """Return where a chunk lies, in a shard that is checked before its first use."""
        number, key = split_name(name)
        shard = f"{self._folder(number)}/{shard_of(key)}"
        if shard not in self._checked:
            self._check(shard)
        return f"{shard}/{key.hex()}"

    def forget_shards(self) -> None:
        """Check each shard again at its next use."""
        self._checked.clear()

    def _check(self, shard: str) -> None:
        """Remove a link or file in place of a shard folder; the next store makes the folder."""
        try:
            facts = self.vfs.lstat(shard)
            if not stat.S_ISDIR(facts.st_mode):
                self.vfs.unlink(shard)
                kind = "corrupt_link" if stat.S_ISLNK(facts.st_mode) else strangeness(facts)
                self._count(kind or "corrupt_special")
                log.warning("disk: %s was no folder and is removed", shard)
        except OSError:
            return  # missing or unusable: opening a file in it reports why
        self._checked.add(shard)

    def read(self, name: Name, key: bytes, target: memoryview) -> tuple[str | None, Seen | None]:
        """Fill ``target`` with a chunk of the own namespace; return a counter's reason, or None.

        Raises nothing. After damage it tells what was seen.
        """
        reason, facts = self.chunks.read(self.path_of(name), key, target)
        return reason, None if facts is None else facts.st_ino

    def drafts(self, chunk_bytes: int, count: int) -> list[FileDraft]:
        """Return new places for so many chunks of this length."""
        return [FileDraft(self, self._temporary(), overwrites=False) for _ in range(count)]

    def take_over_all(self, names: Sequence[Name], chunk_bytes: int) -> dict[Name, FileDraft]:
        """Hide chunks whose places suit those of this length, and return the places.

        Raises nothing. The rest is as before.
        """
        taken = dict[Name, FileDraft]()
        for name in names:
            path = self.path_of(name)
            with contextlib.suppress(OSError):
                if can_become(self.vfs.lstat(path), chunk_bytes):
                    draft = FileDraft(self, self._temporary(), overwrites=True)
                    self.vfs.rename(path, draft.path)
                    taken[name] = draft
        return taken

    def used_ns(self, name: Name) -> int:
        """Return when any process used a chunk last; FileNotFoundError: it is gone."""
        return self.vfs.lstat(self.path_of(name)).st_atime_ns

    def record_uses(self, uses: Mapping[Name, int]) -> None:
        """Tell other processes, and the next start, of uses of chunks that are there."""
        for name, used_ns in uses.items():
            path = self.path_of(name)
            with contextlib.suppress(OSError):
                self.vfs.utime(path, used_ns, self.vfs.lstat(path).st_mtime_ns)

    def allocated_bytes(self, name: Name) -> int:
        """Return the bytes that a chunk takes up; 0: it is gone."""
        try:
            return self.vfs.lstat(self.path_of(name)).st_blocks * 512
        except FileNotFoundError:
            return 0

    def is_still(self, name: Name, seen: Seen) -> bool:
        """Return whether a chunk still is what a reader saw; FileNotFoundError: it is gone."""
        return self.vfs.lstat(self.path_of(name)).st_ino == seen

    def sync(self, name: Name, *, is_new: bool) -> None:
        """Make a chunk durable; ``is_new``: its own writer calls."""
        path = self.path_of(name)
        if not is_new:
            self.vfs.sync(path)
        self.vfs.sync(os.path.dirname(path))

    def remove(self, name: Name) -> None:
        """Remove a chunk; FileNotFoundError: it is gone."""
        self.vfs.unlink(self.path_of(name))

    def set_aside(self, name: Name, path: str) -> None:
        """Move a damaged chunk into a file of its own; FileNotFoundError: it is gone."""
        self.vfs.rename(self.path_of(name), path)
