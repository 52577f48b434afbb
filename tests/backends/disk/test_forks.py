"""A process that opened the backend and then forked: the child has neither threads nor locks."""

import os
import signal
import subprocess
import sys

from disk_parts import until

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.paths import WRITERS
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, slots

SIZE = 8192
KEYS = keys_of(3)

FORKING = """
import asyncio, json, os, signal, sys, time
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.paths import WRITERS
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, slots

root, = sys.argv[1:]
keys = keys_of(3)
backend = DiskBackend(DiskOptions(root=root, min_free=ByteSize(0)), "forked")
assert backend.wait_ready(20) and backend._store.root.evictor.held
assert asyncio.run(backend.write(keys, filled(keys, 8192))) == [True] * 3
"""

OWNER_DIES = (
    FORKING
    + """
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
time.sleep(1.5)  # some ticks while the child runs
os.kill(os.getpid(), signal.SIGKILL)
"""
)

CHILD_ENDS = (
    FORKING
    + """
# Files that the child opens take the numbers of the descriptors it closed.
child = os.fork()
if not child:
    mine = [os.open(f"{root}.child", os.O_RDWR | os.O_CREAT) for _ in range(16)]
    os.write(mine[0], b"mine")
    answers = asyncio.run(backend.read(keys, slots(3, 8192)))
    answers += asyncio.run(backend.write(keys, filled(keys, 8192)))
    answers += asyncio.run(backend.contains(keys))
    answers += [backend.holds(key) for key in keys]
    asyncio.run(backend.remove(keys))
    asyncio.run(backend.describe({"model": "m"}))
    assert asyncio.run(backend.purge(["forked"])) == 0
    asyncio.run(backend.close())
    assert os.pread(mine[0], 100, 0) == b"mine"
    os._exit(1 if any(answers) else 0)
assert os.waitpid(child, 0)[1] == 0
assert os.listdir(f"{root}/{WRITERS}") == [os.path.basename(backend._store.root.writer.folder)]
assert asyncio.run(backend.read(keys, slots(3, 8192))) == [True] * 3
more = keys_of(3, "more")
assert asyncio.run(backend.write(more, filled(more, 8192))) == [True] * 3
assert backend.counters() == {}, backend.counters()
asyncio.run(backend.close())
"""
)


RACING = """
import fcntl, os, signal, sys, threading, time
from kvoffload.backends.disk.vfs import Vfs

path, turns = sys.argv[1], int(sys.argv[2])
vfs, over, children = Vfs(), threading.Event(), []

def lock_and_close():
    while not over.is_set():
        fd = vfs.open(path, os.O_RDWR | os.O_CREAT)
        vfs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        vfs.close(fd)

locking = threading.Thread(target=lock_and_close)
locking.start()
for _ in range(turns):
    child = os.fork()
    if not child:
        time.sleep(60)
    children.append(child)
over.set()
locking.join()
try:
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free", flush=True)
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


def forked_by_a_dead_owner(root):
    """Open a root in a process that forks a child and is killed; return the child's number."""
    command = [sys.executable, "-c", OWNER_DIES, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.wait() == -signal.SIGKILL
    return child


async def test_an_owner_that_died_is_succeeded_although_its_forked_child_lives(tmp_path):
    child = forked_by_a_dead_owner(tmp_path)
    try:
        backend = DiskBackend(DiskOptions(root=str(tmp_path), min_free=ByteSize(0)), "forked")
        own = [os.path.basename(backend._store.root.writer.folder)]
        assert await until(lambda: backend._store.root.evictor.held)
        assert await until(lambda: os.listdir(tmp_path / WRITERS) == own)
        os.kill(child, 0)  # the child is alive
        assert await backend.write(KEYS, filled(KEYS, SIZE)) == [True] * 3
        assert await backend.read(KEYS, slots(3, SIZE)) == [True] * 3
        await backend.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_has_only_misses_and_takes_nothing_from_its_parent(tmp_path):
    command = [sys.executable, "-c", CHILD_ENDS, str(tmp_path / "kv")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_lock_given_up_while_others_fork_is_given_up(tmp_path):
    """A child forked between two system calls has a copy of the descriptor, but not of the lock."""
    command = [sys.executable, "-c", RACING, str(tmp_path / "lock"), "50"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (0, "free\n"), ended.stderr
