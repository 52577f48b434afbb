"""A foreign quota file: with a valid seal, and with counts that no root has."""

import errno
import fcntl
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from kvoffload.backends.disk.quota import Quota, recorded_bytes
from kvoffload.backends.disk.vfs import Vfs
from tests.support.vfs import FailingVfs


def sealed(resident, changes):
    record = struct.pack("<8sQqQ", b"KVOLEDGR", 1, resident, changes)
    return record + struct.pack("<Q", xxhash.xxh3_64_intdigest(record))


ABSURD = {
    "changes": sealed(0, 2**64 - 1),
    "bytes": sealed(2**63 - 1, 5),
    "negative bytes": sealed(-(2**63), 5),
}


@pytest.mark.parametrize("name", ABSURD)
def test_a_sealed_ledger_with_absurd_counts_is_damaged_until_it_is_set_right(tmp_path, name):
    path = tmp_path / ".ledger"
    path.write_bytes(ABSURD[name])
    quota = Quota(Vfs(), str(path), fresh=False)
    assert quota.refresh() is None
    assert not quota.reserve(100, 1 << 40)
    quota.release(-100)
    assert quota.correct(0)
    assert quota.refresh() == 0
    assert quota.reserve(100, 1 << 40)
    assert quota.refresh() == 100
    quota.close()


def test_the_last_count_that_is_good_has_a_good_successor(tmp_path):
    path = tmp_path / ".ledger"
    path.write_bytes(sealed(7, 2**62 - 1))
    quota = Quota(Vfs(), str(path), fresh=False)
    assert quota.refresh() == 7
    assert quota.reserve(100, 1 << 40)
    assert quota.refresh() == 107
    quota.close()


def test_a_ledger_that_a_stopped_process_has_locked_is_an_error_for_those_who_only_look(tmp_path):
    path = tmp_path / ".ledger"
    path.write_bytes(sealed(7, 5))
    assert recorded_bytes(Vfs(), str(path)) == 7
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="locked by another process"):
            recorded_bytes(Vfs(), str(path))
    assert recorded_bytes(Vfs(), str(path)) == 7


def test_why_a_change_was_not_made_is_told_to_the_thread_that_asked_for_it(tmp_path):
    vfs = FailingVfs(0, errno.EIO, when=lambda call, path: call == "pwritev")
    quota = Quota(vfs, str(tmp_path / ".ledger"), fresh=True)
    with ThreadPoolExecutor(1) as another:
        vfs.nth = vfs.calls + 1
        assert not another.submit(quota.reserve, 100, 1 << 40).result()
        assert quota.reserve(100, 1 << 40)
        assert quota.failure is None
        assert another.submit(lambda: quota.failure).result().errno == errno.EIO
        quota.close()
        assert not another.submit(quota.reserve, 100, 1 << 40).result()
        assert another.submit(lambda: quota.failure).result() is None
