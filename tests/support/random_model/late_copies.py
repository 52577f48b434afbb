"""Copies between the KV cache and host memory that are late, in any order, and fail as planned."""

import contextlib
import queue
import time

import torch

from kvoffload.transfer import factory
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from tests.support.late_device import LateDevice
from tests.support.planned_store import register
from tests.support.random_model import hostile


class LateCopier(CpuCopier):
    """Copies as a busy GPU does: late, and in any order; some fail, and some are refused."""

    control, lag_s, has_streams = None, 0.0, False
    """Set by the model. The second is of each copy, at most; the third: a GPU's are made."""

    def __init__(self, *parts):
        self._late, self._is_last = [], False
        super().__init__(*parts)

    def launch(self, *parts):
        if self.control.strikes("copy_refused"):
            raise RuntimeError("planned")
        return super().launch(*parts)

    def _next_job(self):
        if not self._late and not self._is_last:
            self._note(super()._next_job())
        if self._late:
            is_slow = self.control.strikes("copy_slow")
            most_s = self.control.get("copy_slow_s") if is_slow else self.lag_s
            time.sleep(most_s * self.control.draw.random())
        with contextlib.suppress(queue.Empty):
            while True:
                self._note(self._queue.get_nowait())
        return self._late.pop(self.control.draw.randrange(len(self._late))) if self._late else None

    def _note(self, job):
        if job is None:
            self._is_last = True
        else:
            self._late.append(job)

    def _copy(self, job):
        if self.control.strikes("copy_fails"):
            raise OSError("planned")
        super()._copy(job)


class FailingDevice(LateDevice):
    """A GPU whose copies are late as well, and fail as planned, some of them enqueued."""

    def copy(self, stream, copies, to_host, memory):
        super().copy(stream, copies, to_host, memory)
        if LateCopier.control.strikes("copy_fails"):
            raise RuntimeError("planned")


def late_copier(kv_caches, slab, layout):
    """Make the copier of a CPU, or that of a GPU over memory of the CPU."""
    if not LateCopier.has_streams:
        return LateCopier(kv_caches, slab, layout)
    device = FailingDevice(kv_caches, slab, LateCopier.control.draw.randrange(1 << 30))
    return StreamCopier(kv_caches, slab, layout, device, stage_bytes=1 << 16)


def install(folder, monkeypatch):
    """Register these tiers here, and in the I/O processes started from here."""
    module = hostile.__name__
    lines = "".join(f"{name} = {module}:{name.capitalize()}\n" for name in hostile.HANGS)
    groups = f"[kvoffload.backends]\n{lines}[kvoffload.policies]\nmoody = {module}:Moody\n"
    register(folder, monkeypatch, groups)
    monkeypatch.setattr(factory, "CpuCopier", late_copier)
    torch.set_num_threads(1)  # the stand-in of a GPU would start more of them, some time
