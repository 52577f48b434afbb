"""A store that answers the canary too late, with what it then still does to host memory."""

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch

from benchmarks.harness import caches_of
from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.self_test import check_tiers
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.messages import CPULoadStoreSpec, GPULoadStoreSpec
from tests.support.vfs import StuckVfs


def test_a_read_of_the_canary_that_ends_late_touches_nobodys_chunk(tmp_path, plug_in, until):
    opened = []

    class Stuck:
        Options = DiskBackend.Options

        def __new__(cls, options, namespace):
            vfs = StuckVfs(lambda call, path: call == "preadv" and "/." not in path)
            vfs.release()
            store = DiskBackend(options, namespace, vfs=vfs)
            vfs.hold()
            opened.append(vfs)
            return store

    plug_in("stuck", Stuck)
    tensor = torch.zeros(8, 4096, dtype=torch.int8)
    caches = caches_of([tensor])
    settings = read_settings(
        {
            "cpu_bytes": 1 << 20,
            "blocks_per_chunk": 1,
            "io": "thread",  # where this process's registry is read
            "load_timeout_s": 0.2,
            "backends": [
                {"type": "stuck", "root": str(tmp_path / "kv"), "min_free": 0, "io": "direct"}
            ],
        }
    )
    spec = TieredOffloadingSpec(settings, 4096, {"test": "late"})
    transfers = spec.open_engine(caches)
    try:
        # The read hangs; it is only warned about.
        first_slot = check_tiers(spec, transfers, caches, {0: [tensor]}, 1)
        # Serving begins: every slot that the manager may use gets a chunk.
        slots = range(first_slot, spec.num_slots)
        tensor[1] = 7
        for slot in slots:
            transfers.submit(slot, (GPULoadStoreSpec([1]), CPULoadStoreSpec([slot])), 1)
        transfers.wait(slots)
        assert all(result.success for result in transfers.get_finished())
        opened[0].release()  # the disk answers after all
        until(transfers.get_settled)
        for slot in slots:
            transfers.submit(slot, (CPULoadStoreSpec([slot]), GPULoadStoreSpec([5])), 1)
            transfers.wait([slot])
            assert all(result.success for result in transfers.get_finished())
            assert torch.equal(tensor[5], tensor[1])
        assert first_slot == 1
    finally:
        opened[0].release()
        spec.close()
