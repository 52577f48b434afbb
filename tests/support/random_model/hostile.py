"""Tiers whose faults shared memory plans, so that they strike in an I/O process as well.

``hostile`` keeps the contract of a plug-in and is as nasty as that allows: it hangs without heeding
cancellations, is slow, raises, answers with the wrong length, says that it lacks what it has, and
fills memory with garbage until its call returns. ``shy`` is the same without an index. ``rough`` is
the disk tier on a device that is slow, hangs, is full and tears writes, with the policy ``moody``,
which raises.

An I/O process imports this module at its low priority: without torch, which would take it 1.2 s of
a core, and a minute on a machine that is busy enough.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import mmap
import os
import random
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import ClassVar

import msgspec

from kvoffload.backends.base import Spares
from kvoffload.backends.changes import ChangedKeys
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.cached_files import CachedFiles
from kvoffload.policies.lru import LRUPolicy
from tests.support.vfs import HookedVfs

KNOBS = ("hang", "hang_s", "slow", "slow_s", "raises", "length", "garbage", "refuses")
KNOBS += ("disk_slow", "disk_slow_s", "disk_full", "disk_fails", "disk_stale", "disk_tears")
KNOBS += ("policy", "hung", "copy_slow", "copy_slow_s", "copy_fails", "copy_refused")
HANGS = ("hostile", "shy", "rough")
"""Tiers whose calls hang, all of them, while the plan says so: ``hung`` is the place, from 1."""


class Control:
    """Probabilities and seconds that several processes read: a plan of faults.

    Args:
        path: of the plan.
        seed: written there by the first one; decides what each opened tier draws.
    """

    def __init__(self, path, seed=None):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * len(KNOBS) + 8)
        self._map = mmap.mmap(fd, 8 * len(KNOBS) + 8)
        os.close(fd)
        if seed is not None:
            struct.pack_into("<q", self._map, 8 * len(KNOBS), seed)
        self.draw = random.Random(struct.unpack_from("<q", self._map, 8 * len(KNOBS))[0])

    def set(self, **values):
        """Plan these faults and no others."""
        for i, name in enumerate(KNOBS):
            struct.pack_into("<d", self._map, 8 * i, float(values.get(name, 0.0)))

    def get(self, name):
        return struct.unpack_from("<d", self._map, 8 * KNOBS.index(name))[0]

    def strikes(self, name):
        return self.draw.random() < self.get(name)

    def hang(self, tier):
        """Wait while this tier hangs."""
        while self.get("hung") == 1 + HANGS.index(tier):
            time.sleep(0.01)


class HostileOptions(msgspec.Struct, frozen=True):
    root: str
    control: str


class Shy:
    """Chunks as files with a digest; each call runs on a thread of its own."""

    Options = HostileOptions

    def __init__(self, options, namespace):
        self._control = Control(options.control)
        self._folder = Path(options.root, namespace)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._violations = Path(options.root, "violations")
        self._is_closed = False

    async def contains(self, keys):
        return await self._call(lambda: [self._path(key).exists() for key in keys], len(keys))

    async def read(self, keys, into):
        return await self._call(lambda: self._read_all(keys, into, None), len(keys))

    async def write(self, keys, chunks):
        return await self._call(lambda: self._write_all(keys, chunks), len(keys))

    async def remove(self, keys):
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        if self._control.strikes("raises"):
            raise OSError("planned")

    async def close(self):
        try:
            await self._call(self._rest, 0)
        finally:
            self._is_closed = True

    # ---- on the call's thread ----

    def _read_all(self, keys, into, arrived):
        answers = []
        for i, (key, view) in enumerate(zip(keys, into, strict=True)):
            self._rest()
            is_good = not self._control.strikes("garbage") and self._get(key, view)
            if not is_good:
                view[:] = self._control.draw.randbytes(len(view))
            answers.append(is_good)
            if is_good and arrived is not None:
                arrived(i)
        return answers

    def _get(self, key, view):
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return False
        if len(data) != 16 + len(view) or self._digest(key, data[16:]) != data[:16]:
            return False
        view[:] = data[16:]
        return True

    def _write_all(self, keys, chunks):
        answers = []
        for key, chunk in zip(keys, chunks, strict=True):
            before = bytes(chunk)
            self._rest()
            if bytes(chunk) != before:
                self._violations.write_text(f"{key.hex()} changed while it was written")
            answers.append(not self._control.strikes("refuses") and self._put(key, before))
        return answers

    def _put(self, key, data):
        temporary = self._folder / f"{key.hex()}.{os.getpid()}.{threading.get_ident()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # the model removes folders
            temporary.write_bytes(self._digest(key, data) + data)
            temporary.rename(self._path(key))
        except OSError:
            return False
        self._wrote(key)
        return True

    def _digest(self, key, data):
        """Return what tells a chunk from one of another key or namespace."""
        named = self._folder.name.encode() + key + data
        return hashlib.blake2b(named, digest_size=16).digest()

    def _wrote(self, key):
        pass

    def _rest(self):
        self._control.hang(type(self).__name__.lower())
        if self._control.strikes("hang"):
            time.sleep(self._control.get("hang_s") * self._control.draw.random())
        elif self._control.strikes("slow"):
            time.sleep(self._control.get("slow_s") * self._control.draw.random())

    def _path(self, key):
        return self._folder / key.hex()

    async def _call(self, work, items):
        """Do it on a thread; a cancelled call returns when the thread has ended."""
        if self._is_closed:
            return [False] * items
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        threading.Thread(target=_perform, args=(work, loop, future), daemon=True).start()
        try:
            answers = await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            raise
        if self._control.strikes("raises"):
            raise OSError("planned")
        if items and self._control.strikes("length"):
            return self._control.draw.choice([answers[:-1], [*answers, True], {1: 2}])
        return answers


def _perform(work, loop, future):
    try:
        answers = work()
    except OSError as error:  # a folder was removed
        answers = error
    with contextlib.suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(_settle, future, answers)


def _settle(future, answers):
    if isinstance(answers, OSError):
        future.set_exception(answers)
    else:
        future.set_result(answers)


class Hostile(Shy, Spares):
    """With an index, a report of each chunk that has arrived, and a note of what it is told."""

    is_shared = True

    def __init__(self, options, namespace):
        super().__init__(options, namespace)
        self._note, self._spared, self._claims = Path(options.root, "told"), [], {}
        self._note_told()
        names = (path.name for path in self._folder.iterdir())
        self._known = {bytes.fromhex(name) for name in names if "." not in name}
        self._changes = ChangedKeys()
        self._is_complete = False

    def _wrote(self, key):
        self._known.add(key)
        self._changes.note(key)

    def holds(self, key):
        return not self._is_closed and key in self._known

    def forget(self, keys):
        for key in keys:
            self._known.discard(key)
            self._changes.note(key)

    def take_changes(self, limit):
        if not self._changes.is_read:
            self._changes.begin_parts([list(self._known)])
        keys = self._changes.take(limit)
        self._is_complete = self._is_complete or not self._changes
        return [(key, key in self._known) for key in keys]

    @property
    def is_complete(self):
        return self._is_complete

    async def read_each(self, keys, into, arrived):
        return await self._call(lambda: self._read_all(keys, into, arrived), len(keys))

    def spare(self, keys):
        self._spared = [key.hex() for key in keys]
        self._note_told()

    def expect(self, returns, share):
        for told in returns:
            self._claims.pop(told.claim.hex(), None)
            if told.in_s is not None:
                self._claims[told.claim.hex()] = told.in_s
        self._note_told()

    def _note_told(self):
        """Tell the model, in one step; stores of several engines write at the same time."""
        draft = self._note.with_suffix(f".{os.getpid()}-{id(self)}")
        with contextlib.suppress(OSError):  # the model removes folders
            draft.write_text(json.dumps([self._spared, list(self._claims)]))
            draft.rename(self._note)


class RoughVfs(HookedVfs):
    """A device that is slow, fails and is full as planned."""

    def __init__(self, control):
        super().__init__()
        self._control = control

    def around(self, call, path, perform):
        if call in ("preadv", "pwritev"):
            self._control.hang("rough")
        if self._control.strikes("disk_slow"):
            time.sleep(self._control.get("disk_slow_s") * self._control.draw.random())
        if call == "pwritev" and self._control.strikes("disk_full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if call in ("open", "preadv", "rename", "unlink") and self._control.strikes("disk_fails"):
            number = self._control.draw.choice((errno.EIO, errno.EACCES, errno.EROFS, errno.ENOMEM))
            raise OSError(number, os.strerror(number), path)
        if self._control.strikes("disk_stale"):  # whatever the call
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return perform()

    def pwritev(self, fd, buffers, offset):
        """Write; of what is torn, a part is written before the call fails or says how much."""
        if not self._control.strikes("disk_tears"):
            return super().pwritev(fd, buffers, offset)
        whole = b"".join(buffers)
        part = whole[: self._control.draw.randrange(len(whole) + 1)]
        self._write_through_cache(fd, part, offset)
        if self._control.draw.random() < 0.5:
            number = self._control.draw.choice((errno.EIO, errno.ENOSPC))
            raise OSError(number, os.strerror(number), self._paths[fd])
        return len(part)

    def _write_through_cache(self, fd, data, offset):
        """Write any length at any place, which a direct descriptor refuses."""
        there = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            os.pwrite(there, data, offset)
        finally:
            os.close(there)


class Moody(LRUPolicy):
    """Raises as planned, before it has done anything."""

    control = None
    """Set by the tier, before it makes its policy."""

    def add(self, keys):
        self._be_asked()
        super().add(keys)

    def touch(self, keys):
        self._be_asked()
        super().touch(keys)

    def remove(self, keys):
        self._be_asked()
        super().remove(keys)

    def victims(self, count):
        self._be_asked()
        return super().victims(count)

    def _be_asked(self):
        if self.control is not None and self.control.strikes("policy"):
            raise RuntimeError("planned")


class RoughOptions(DiskOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    control: str
    form: str = "slots"


class Rough(DiskBackend):
    """The disk tier on such a device."""

    Options, reader = RoughOptions, CachedFiles
    opened: ClassVar = weakref.WeakSet()
    """Those of this process."""

    def __init__(self, options, namespace):
        Moody.control = control = Control(options.control)
        super().__init__(options, namespace, vfs=RoughVfs(control))
        if options.form == "files":
            self._store.why_no_slots = "the model wants files"
        self.opened.add(self)
