"""Power losses, simulated: record what was written, then rebuild what a crash could have left.

The recorder runs on the real file system. A crash state keeps what was synced; of everything else
each sector may be old, new or zero, sizes may lag behind, and names may be missing. That is more
than most file systems do, and no less.
"""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvoffload.backends.disk.vfs import Buffers
from tests.support.vfs import HookedVfs

T = TypeVar("T")

SECTOR = 512


class Step(NamedTuple):
    """One recorded change.

    ``what``: create, write, length, rename, unlink, mkdir, sync or note.
    """

    what: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


class RecordingVfs(HookedVfs):
    """The operating system, keeping a list of everything that changes a disk."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root
        self.steps: list[Step] = []
        # Recording and doing are one step, or the list would lie about the order.
        self._order = threading.Lock()

    def note(self, text: str) -> None:
        """Put a mark into the list: a promise given to the caller at this moment."""
        with self._order:
            self.steps.append(Step("note", text))

    def open(self, path: str, flags: int) -> int:
        """Open, noting new files."""
        with self._order:
            new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            fd = super().open(path, flags)
            if new:
                self._record("create", path)
            return fd

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write, keeping what was written."""
        with self._order:
            done = super().pwritev(fd, buffers, offset)
            self._record("write", self._paths[fd], offset=offset, data=b"".join(buffers)[:done])
            return done

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Punch a hole: from here on it reads as zeros."""
        with self._order:
            super().punch(fd, offset, length)
            self._record("write", self._paths[fd], offset=offset, data=bytes(length))

    def set_length(self, fd: int, length: int) -> None:
        """Make a file longer or shorter: what is new reads as zeros."""
        with self._order:
            super().set_length(fd, length)
            self._record("length", self._paths[fd], offset=length)

    def fsync(self, fd: int) -> None:
        """Sync; from here on it is safe."""
        with self._order:
            super().fsync(fd)
            self._record("sync", self._paths[fd])

    def rename(self, source: str, target: str) -> None:
        """Rename; open descriptors follow their file."""
        with self._order:
            super().rename(source, target)
            for fd, path in self._paths.items():
                if path == source or path.startswith(source + "/"):
                    self._paths[fd] = target + path[len(source) :]
            self._record("rename", source, other=self._short(target))

    def around(self, call: str, path: str, perform: Callable[[], T]) -> T:
        """Record the calls that are their own whole story."""
        if call not in ("unlink", "mkdir", "rmdir"):
            return perform()
        with self._order:
            result = perform()
            self._record(call, path)
            return result

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def _record(
        self, what: str, path: str, other: str = "", offset: int = 0, data: bytes = b""
    ) -> None:
        self.steps.append(Step(what, self._short(path), other, offset, data))


class _File:
    """One inode: what is surely on the medium, and what may be."""

    def __init__(self) -> None:
        self.safe = bytearray()
        self.loose: list[Step] = []

    def sync(self) -> None:
        for step in self.loose:
            if step.what == "length":
                _set_length(self.safe, step.offset)
            else:
                _put(self.safe, step.offset, step.data)
        self.loose.clear()

    def after_crash(self, rng: random.Random) -> bytes:
        content = bytearray(self.safe)
        fate = rng.random()
        for step in self.loose:
            if fate < 0.2:
                break
            if step.what == "length" and (fate > 0.6 or rng.random() < 0.7):
                _set_length(content, step.offset)
            for at in range(0, len(step.data), SECTOR):
                start, sector = step.offset + at, step.data[at : at + SECTOR]
                if fate > 0.6 or rng.random() < 0.7:
                    _put(content, start, sector)
                elif len(content) < start + len(sector) and rng.random() < 0.5:
                    # What was synced of a sector that grows is not zero.
                    content.extend(bytes(start + len(sector) - len(content)))
        if self.loose and rng.random() < 0.2:
            del content[rng.randrange(min(len(self.safe), len(content)), len(content) + 1) :]
        return bytes(content)


class Crash(NamedTuple):
    """A state a crash could have left."""

    notes: list[str]
    """What had been promised by then."""
    folders: list[str]
    files: dict[str, bytes]


def crash(steps: list[Step], rng: random.Random) -> Crash:
    """Cut the power after a random number of steps and see what is left."""
    cut = rng.randrange(len(steps) + 1)
    files: dict[int, _File] = {}
    names: dict[str, int] = {}
    changes: list[tuple[Step, int]] = []
    safe = -1
    folder_safe: dict[str, int] = {}
    notes: list[str] = []
    for step in steps[:cut]:
        if step.what == "note":
            notes.append(step.path)
        elif step.what in ("write", "length"):
            files[names[step.path]].loose.append(step)
        elif step.what == "sync" and step.path in names:
            files[names[step.path]].sync()
        elif step.what == "sync":
            folder_safe[step.path] = safe = len(changes) - 1
        else:
            changes.append((step, _apply_name(step, names, files)))
    ordered = rng.random() < 0.5
    kept_until = rng.randrange(safe, len(changes)) if ordered and changes else -1
    left = _Names()
    chains_cut: set[int] = set()
    for number, (step, inode) in enumerate(changes):
        parents = {os.path.dirname(path) or "." for path in (step.path, step.other) if path}
        synced = any(folder_safe.get(parent, -1) >= number for parent in parents)
        if ordered:
            if number <= kept_until:
                left.apply(step, inode)
        elif synced or (inode not in chains_cut and rng.random() < 0.8):
            left.apply(step, inode)
        else:
            chains_cut.add(inode)  # what happened later to this file did not happen either
    contents = {
        path: files[inode].after_crash(rng)
        for path, inode in left.files.items()
        if left.has_folder(os.path.dirname(path))
    }
    return Crash(notes, sorted(filter(left.has_folder, left.folders)), contents)


def rebuild(state: Crash, root: str) -> None:
    """Lay a crash state out as a folder."""
    os.makedirs(root, 0o700, exist_ok=True)
    for folder in state.folders:
        os.makedirs(f"{root}/{folder}", 0o700, exist_ok=True)
    for path, content in state.files.items():
        with open(f"{root}/{path}", "wb") as file:
            file.write(content)


def crashes(steps: list[Step], rng: random.Random, count: int, root: Path) -> Iterator[Crash]:
    """Yield so many states that a crash could have left, each laid out as a folder for its turn."""
    for _ in range(count):
        state = crash(steps, rng)
        rebuild(state, str(root))
        yield state
        shutil.rmtree(root)


class _Names:
    """Names after a crash: those whose changes were kept."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.folders: set[str] = set()

    def has_folder(self, path: str) -> bool:
        """Whether a folder and all those around it are there."""
        return not path or (path in self.folders and self.has_folder(os.path.dirname(path)))

    def apply(self, step: Step, inode: int) -> None:
        if step.what == "create":
            self.files[step.path] = inode
        elif step.what == "mkdir":
            self.folders.add(step.path)
        elif step.what == "rmdir":
            self.folders.discard(step.path)
        elif step.what == "unlink":
            self.files.pop(step.path, None)
        elif step.path in self.folders:
            self._move_folder(step.path, step.other)
        else:
            self.files.pop(step.path, None)
            self.files[step.other] = inode

    def _move_folder(self, source: str, target: str) -> None:
        self.folders.discard(source)
        self.folders.add(target)
        for path in [path for path in self.files if path.startswith(source + "/")]:
            self.files[target + path[len(source) :]] = self.files.pop(path)


def _apply_name(step: Step, names: dict[str, int], files: dict[int, _File]) -> int:
    """Follow one change of names as it happened; return the inode it was about."""
    if step.what == "create":
        inode = len(files)
        files[inode] = _File()
        names[step.path] = inode
        return inode
    if step.what == "unlink":
        return names.pop(step.path)
    if step.what == "rename" and step.path in names:
        inode = names[step.other] = names.pop(step.path)
        return inode
    for path in [path for path in names if path.startswith(step.path + "/")]:
        names[step.other + path[len(step.path) :]] = names.pop(path)
    return -1


def _set_length(content: bytearray, length: int) -> None:
    del content[length:]
    content.extend(bytes(length - len(content)))


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data
