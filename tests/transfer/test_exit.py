"""The interpreter's end meets none of our threads within torch's code or the driver's."""

import subprocess
import threading

import pytest

from kvoffload.transfer.cuda import pinning
from kvoffload.transfer.cuda.pinning import Pinning
from kvoffload.transfer.slab import Slab

CHILD = """
import os, sys, threading
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from tests.support.interleavings import small_parts
from tests.support.late_device import LateDevice

class Device(LateDevice):
    def close(self):
        left = [t.name for t in threading.enumerate() if "kvoffload" in t.name]
        print("closed, threads:", *left, flush=True)

caches, layout, slab = small_parts()
copier = StreamCopier(caches, slab, layout, Device(caches, slab, 1))
"""
FORKS = """
if os.fork() == 0:
    sys.exit()
os.wait()
"""


@pytest.mark.parametrize(
    ("ends", "times"), [("", 1), ("copier.close()", 1), (FORKS, 1), ("os._exit(0)", 0)]
)
def test_a_copier_that_was_not_closed_is_closed_when_its_process_ends(preloaded, ends, times):
    words = [*preloaded.command, "-c", CHILD + ends]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "closed, threads:\n" * times
    assert (done.returncode, done.stderr) == (0, "")


def test_a_registration_that_hangs_keeps_neither_a_close_nor_the_process(monkeypatch, caplog):
    monkeypatch.setattr(pinning, "CLOSE_TIMEOUT_S", 0.05)
    slab, hangs = Slab(2, 8192), threading.Event()
    pinned = Pinning(slab, lambda address, length: hangs.wait(60), lambda address: None)
    closes = threading.Thread(target=pinned.close)
    closes.start()
    closes.join(10)
    assert not closes.is_alive()
    assert "left alone" in caplog.text
    hangs.set()
    pinned.close()
    assert pinned.pinned_bytes == 0
