"""Nothing is left of a transfer that has ended: no event, table, fence, thread or descriptor."""

import gc
import os
import random
import threading
import time
from collections import Counter

import pytest

from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from tests.support.fence_ends import ends
from tests.support.interleavings import NUM_BLOCKS, NUM_SLOTS, small_parts
from tests.support.late_device import LateDevice
from tests.support.moves import move, moves_of

pytestmark = pytest.mark.usefixtures("one_thread")


def held():
    """How many objects of the package there are, of each type; threads and descriptors."""
    gc.collect()
    ours = (type(thing) for thing in gc.get_objects())
    # Some classes of other packages have something else than a text there.
    found = Counter(kind.__name__ for kind in ours if str(kind.__module__).startswith("kvoffload."))
    found["threads"] = threading.active_count()
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    return found


def grown(before):
    """What there is more of. Less is no growth: objects of earlier tests may be freed meanwhile."""
    return {name: n for name, n in held().items() if n > before[name]}


@pytest.mark.parametrize(
    "count", [800, pytest.param(100_000, marks=[pytest.mark.chaos, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize("on", ["cpu", "device"])
def test_many_transfers_leave_nothing_behind(on, count):
    caches, layout, slab = small_parts()
    device = LateDevice(caches, slab, seed=0)
    if on == "cpu":
        copier = CpuCopier(caches, slab, layout)
    else:
        copier = StreamCopier(caches, slab, layout, device, stage_bytes=1000)
    draw = random.Random(0)

    def transfer(count):
        for _ in range(count // NUM_SLOTS):
            to_host = draw.random() < 0.5
            blocks = draw.sample(range(NUM_BLOCKS), 2 * NUM_SLOTS)
            fences = []
            for slot in range(NUM_SLOTS):
                moves = moves_of(move(slot, blocks[2 * slot :][:2]))
                fences.append(copier.launch(moves, to_host, copier.record_fence()))
            assert all(ends(fence) and fence.error is None for fence in fences)
            device.run_all()

    try:
        transfer(800)
        before = held()
        transfer(count)
        # The copier's thread lets go of its last transfer after that one's fence is reached.
        until_s = time.monotonic() + 60
        while (more := grown(before)) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert more == {}
    finally:
        copier.close()
