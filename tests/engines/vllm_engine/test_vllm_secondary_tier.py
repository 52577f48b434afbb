"""Our backends as a secondary tier of vLLM's own tiering, without an engine."""

import types

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvoffload import registry
from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.config import convert
from kvoffload.connectors.vllm.tier import KVOffloadTier, TierOptions
from kvoffload.errors import ConfigError
from kvoffload.messages import make_offload_key
from tests.support.vfs import StuckVfs, kind_of

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]


@pytest.fixture
def disk(monkeypatch):
    """The file system under the tier; ``hold()`` makes reads of chunks hang."""
    vfs = StuckVfs(lambda call, path: call == "preadv" and kind_of(path) == "chunk")
    vfs.release()
    monkeypatch.setattr(
        registry,
        "open_backend",
        lambda name, options, namespace: DiskBackend(
            DiskBackend.Options(**options), namespace, vfs=vfs
        ),
    )
    yield vfs
    vfs.release()


@pytest.fixture
def tier(tmp_path, disk):
    rows = memoryview(bytearray(8 * 4096)).cast("B", (8, 4096))
    config = types.SimpleNamespace(
        model=types.SimpleNamespace(name="m", dtype="bfloat16"),
        kv_cache_layout="LBNHC",
        canonical_layout=False,
        groups=(),
        cache=types.SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=types.SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
    )
    made = KVOffloadTier(
        types.SimpleNamespace(config=config),
        rows,
        "KVOffloadTier",
        backend="disk",
        root=str(tmp_path / "kv"),
        min_free=0,
        load_timeout_s=0.2,
    )
    yield made, rows.cast("B")
    made.shutdown()


def _finished(tier):
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    return result


def test_a_backend_serves_as_a_secondary_tier_of_vllms_own_tiering(tier):
    made, rows = tier
    context = ReqContext("r")
    rows[:4096] = b"a" * 4096
    rows[4096:8192] = b"b" * 4096
    made.submit_store(TransferJob(1, KEYS[:2], np.array([0, 1]), False, context))
    assert _finished(made).success
    assert made.lookup(KEYS[0], context) is LookupResult.HIT
    assert made.lookup(KEYS[2], context) is LookupResult.MISS
    made.submit_load(TransferJob(2, [KEYS[1], KEYS[2]], np.array([5, 6]), True, context))
    result = _finished(made)
    assert not result.success
    assert result.successful_keys == [KEYS[1]]
    assert bytes(rows[5 * 4096 : 6 * 4096]) == b"b" * 4096
    assert not made.has_pending_work()


def test_a_hung_read_is_answered_in_time_and_never_touches_the_row(tier, disk, until):
    made, rows = tier
    made.submit_store(TransferJob(1, KEYS[:1], np.array([0]), False, ReqContext("r")))
    assert _finished(made).success
    disk.hold()
    made.submit_load(TransferJob(2, KEYS[:1], np.array([5]), True, ReqContext("r")))
    (result,) = until(made.get_finished_jobs)
    assert not result.success
    rows[5 * 4096 : 6 * 4096] = b"c" * 4096  # vLLM has given the row to another chunk
    disk.release()
    until(lambda: not made._abandoned)
    assert bytes(rows[5 * 4096 : 6 * 4096]) == b"c" * 4096


def test_an_unknown_option_of_the_tier_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="backend"):
        convert({"backand": "disk"}, TierOptions)
