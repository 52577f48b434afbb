"""Two ranks, and pages by layer, on a real engine: equal outputs, and hits in a new process."""

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def serve_again(start, extra, asked, **options):
    """Compare outputs computed, from storage, and in a new process; return the last one's hits."""
    first = start("dynamic", extra, **options)
    computed = first.generate(asked)
    assert computed["storage"] == [0]
    first.wait_stored(asked, computed["tokens"])
    first.kill()
    second = start("dynamic", extra, **options)
    answer = second.generate(asked)
    second.kill()
    assert answer["tokens"] == computed["tokens"]
    return answer["storage"]


def test_two_ranks(start, prompt, tiers, disk, tmp_path):
    extra = tiers(disk(tmp_path / "kv"))
    assert serve_again(
        start, extra, prompt(1), tp_size=2, env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ) == [592]


def test_pages_by_layer(start, prompt, tiers, disk, tmp_path):
    extra = tiers(disk(tmp_path / "kv"))
    assert serve_again(start, extra, prompt(1), hicache_mem_layout="layer_first") == [592]
