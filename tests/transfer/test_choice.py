"""Caches that cannot be copied are refused, by index, before a thread is started."""

import threading
from contextlib import closing

import pytest
import torch
from cuda_stand_in import install

from benchmarks.harness import caches_of
from kvoffload import LocalConnector
from kvoffload.errors import ConfigError
from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.transfer import factory
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

PAGE = 64


def rows(device="cpu", dtype=torch.int8):
    return torch.zeros((8, PAGE), dtype=dtype, device=device)


GOOD = rows()


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ([GOOD, GOOD, rows("meta")], r"tensors = .*\{0: 'cpu', 1: 'cpu', 2: 'meta'\}.*one device"),
        ([GOOD, torch.zeros((PAGE, 8), dtype=torch.int8).t()], r"\[1\] = 'strides \(1, 8\)'"),
        ([torch.zeros((8, 2 * PAGE), dtype=torch.int8)[:, ::2]], r"tensors\[0\] = 'strides.*side"),
        ([GOOD, GOOD.flatten().as_strided((8, PAGE), (PAGE // 2, 1))], r"\[1\].*rows overlap"),
        ([rows(dtype=torch.float16)], r"tensors\[0\] = 'torch.float16 of shape \(8, 64\)"),
        ([GOOD, GOOD.view(2, 4, PAGE)], r"tensors\[1\] = 'torch.int8 of shape \(2, 4, 64\)"),
        ([GOOD, GOOD[:, : PAGE // 2]], r"\[0\]\.page_size_bytes = 64: must be 1 to 32, .* 1$"),
        ([GOOD, None], r"\[0\]\.tensor_idx = 1: must be .* of 1 tensors"),
    ],
)
def test_tensors_that_are_not_rows_of_bytes_on_one_device_are_refused(tensors, named):
    caches = CanonicalKVCaches(
        tuple(CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors if tensor is not None),
        (tuple(CanonicalKVCacheRef(i, PAGE) for i in range(len(tensors))),),
    )
    layout = ChunkLayout(caches, 1)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=named):
        make_copier(caches, Slab(1, layout.slot_bytes), layout)
    assert threading.active_count() == threads


def test_a_device_that_nobody_copies_from_is_refused_by_name():
    caches = caches_of([rows("meta")])
    layout = ChunkLayout(caches, 1)
    with pytest.raises(ConfigError, match=r"kv_caches = .*meta.*must be CPU or CUDA tensors"):
        make_copier(caches, Slab(1, layout.slot_bytes), layout)


@pytest.mark.parametrize(("setting", "way"), [({}, "batched"), ({"batched_copies": False}, "one")])
def test_batched_copies_can_be_switched_off(monkeypatch, setting, way):
    """For a driver whose batches are defective."""
    cuda = install(monkeypatch.setattr, 1 << 20)
    monkeypatch.setattr(factory, "check_caches", lambda caches: torch.device("cuda", 0))
    caches = caches_of([GOOD])
    settings = {"cpu_bytes": "64KiB", "backends": [], **setting}
    with closing(LocalConnector(settings, caches, block_size=4, facts={"model": "m"})) as connector:
        assert connector.stats()["copies"]["copies"].startswith(way)
    assert not cuda.registered


def test_padded_rows_are_not_refused():
    padded = torch.zeros((8, 2 * PAGE), dtype=torch.int8)[:, :PAGE]
    caches = caches_of([padded])
    layout = ChunkLayout(caches, 1)
    make_copier(caches, Slab(1, layout.slot_bytes), layout).close()
