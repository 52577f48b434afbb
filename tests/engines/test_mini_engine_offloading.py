"""Outputs with offloading are those without, token for token, whatever goes wrong below.

Random workloads run on caches just large enough for one request, over a host tier of a few chunks
and a disk, with preemptions, aborts, restarts, stores that misbehave and files damaged while the
engine runs. Beside the tokens, every page is compared: what a load brings, and what is computed on
top of it, has to be bit for bit what an engine without offloading computes for the same prefix.
"""

import random
import time
from collections import Counter

import pytest

from kvoffload import registry
from kvoffload.connectors.local import LocalConnector
from kvoffload.demo import Engine, SamplingParams
from kvoffload.testing import FaultyBackend, Plan
from kvoffload.transfer.cpu.copier import CpuCopier
from tests.support.file_faults import flip
from tests.support.older_engine import older_engine
from tests.support.workloads import (
    MAX_LEN,
    PageCheck,
    Workload,
    damage,
    reasons,
    same_outputs,
    stats,
)

RANDOM, DAMAGED, MISBEHAVING, WITHOUT_HOST = 120, 40, 24, 6
"""Workloads of each kind."""
FIRST, PER_TEST = 8, 24
"""So many in the first test, and in each of ``make chaos``. On a busy machine most stores end later
than the next request comes: of 8 workloads none may have a hit in host memory."""


@pytest.fixture
def total():
    """Counts over a test's workloads, to see that they met what they are meant to meet."""
    return Counter()


def in_both_forms(count, few):
    """Ranges of seeds: the first in a thread, few in a process; ``make chaos`` has the rest."""
    starts = range(0, count, PER_TEST)
    ranges = [range(start, min(start + PER_TEST, count)) for start in starts]
    rest = [("process", each) for each in ranges]
    rest += [("thread", range(max(FIRST, each.start), each.stop)) for each in ranges]
    chaos = [pytest.param(*each, marks=pytest.mark.chaos) for each in rest]
    in_process = [("process", few)] if few else []
    return pytest.mark.parametrize(
        ("form", "seeds"), [("thread", range(FIRST)), *in_process, *chaos], ids=str
    )


@in_both_forms(RANDOM, few=range(3))
def test_random_workloads_give_the_tokens_and_pages_of_no_offloading(
    tiny, tmp_path, total, form, seeds
):
    for seed in seeds:
        workload, truth = Workload(tiny, seed, tmp_path / str(seed)), {}
        workload.in_form(form)
        expected = workload.expected(truth)
        results, counts = workload.run(truth, restarts=seed % 2)
        same_outputs(results, expected)
        total.update(counts)
    assert total["loaded"] > 0
    assert total["preempted"] > 0
    assert total["from cpu"] > 0
    assert total["from disk"] > 0


@pytest.mark.parametrize("misbehaving", [False, True])
def test_without_a_host_cache_tokens_and_pages_are_those_of_no_offloading(
    tiny, tmp_path, monkeypatch, total, misbehaving
):
    opened, open_backend = [], registry.open_backend

    def open_faulty(*args, **kwargs):
        opened.append(FaultyBackend(open_backend(*args, **kwargs), *plans))
        return opened[-1]

    monkeypatch.setattr(registry, "open_backend", open_faulty)
    for seed in range(3000, 3000 + WITHOUT_HOST):
        draw = random.Random(seed)
        faults = [draw.choice(READ_FAULTS), draw.choice(WRITE_FAULTS)] if misbehaving else []
        plans = [Plan(f, frozenset(v), every=2, seconds=0.005) for f, v in faults]
        workload, truth = Workload(tiny, seed, tmp_path / str(seed)), {}
        workload.without_host_cache(draw.choice([1, 2, 4, 20]))
        if misbehaving:
            workload.offload |= {"load_timeout_s": 0.02, "store_timeout_s": 0.02}
        expected = workload.expected(truth)
        results, counts = workload.run(truth, restarts=1)
        same_outputs(results, expected)
        total.update(counts)
    assert total["loaded"] > 0
    assert total["from disk"] > 0
    assert total["from cpu"] == 0
    assert (sum(store.struck for store in opened) > 0) == misbehaving


@in_both_forms(DAMAGED, few=None)
def test_files_damaged_meanwhile_change_no_token(tiny, tmp_path, total, form, seeds):
    for seed in range(1000 + seeds.start, 1000 + seeds.stop):
        root = tmp_path / str(seed)
        workload, truth = Workload(tiny, seed, root), {}
        workload.in_form(form)
        expected = workload.expected(truth)
        draw = random.Random(seed)
        results, counts = workload.run(
            truth, restarts=1, meanwhile=lambda _, draw=draw, root=root: damage(draw, root)
        )
        same_outputs(results, expected)
        total.update(counts)
    assert total["undelivered"] > 0
    assert sum(n for reason, n in total.items() if "corrupt" in reason) > 0
    assert total["read_missing"] > 0


READ_FAULTS = [
    ("raise", ["read"]),
    ("hang", ["read"]),
    ("delay", ["read"]),
    ("miss", ["read"]),
    ("short", ["read"]),
    ("lie", ["contains"]),
]
WRITE_FAULTS = [
    ("raise", ["write", "remove"]),
    ("hang", ["write"]),
    ("delay", ["write"]),
    ("miss", ["write", "contains"]),
    ("short", ["write"]),
    ("lie", ["write"]),
]


@in_both_forms(MISBEHAVING, few=None)
def test_stores_that_misbehave_change_no_token(tiny, tmp_path, planned, total, form, seeds):
    for seed in range(2000 + seeds.start, 2000 + seeds.stop):
        draw = random.Random(seed)
        faults = [draw.choice(READ_FAULTS), draw.choice(WRITE_FAULTS)]
        planned.set(
            *(Plan(f, frozenset(v), every=draw.randint(1, 2), seconds=0.005) for f, v in faults)
        )
        workload, truth = Workload(tiny, seed, tmp_path / str(seed)), {}
        workload.in_form(form)
        # Little host memory over a disk: most loads have to come from the store that misbehaves.
        kind = draw.choice(["planned", "shy"])  # a shy one says some steps later what is there
        workload.offload |= {
            "cpu_bytes": 3 * workload.chunk_bytes,
            "backends": [{"type": kind, "root": str(workload.root), **planned.options}],
            "load_timeout_s": 0.02,
            "store_timeout_s": 0.02,
        }
        expected = workload.expected(truth)
        results, counts = workload.run(truth, restarts=1)
        same_outputs(results, expected)
        total.update(counts)
    assert total["undelivered"] > 0
    assert sum(n for reason, n in total.items() if reason.startswith("failed_")) > 0


class LateFence:
    """A fence that is reached some time after the one it stands for."""

    error = None

    def __init__(self, inner, seconds):
        self.inner, self.seconds = inner, seconds

    def done(self):
        return False

    def wait(self):
        time.sleep(self.seconds)
        self.inner.wait()


def test_blocks_written_again_before_a_late_store_read_them_are_stored_right(tiny, monkeypatch):
    """The second prompt needs the very blocks that the first one's store has yet to read."""
    launch = CpuCopier.launch
    monkeypatch.setattr(
        CpuCopier,
        "launch",
        lambda self, moves, to_host, after, lent=None: launch(
            self, moves, to_host, LateFence(after, 0.2)
        ),
    )
    truth = {}

    def connect(settings, kv_caches, *, block_size, **rest):
        inner = LocalConnector(settings, kv_caches, block_size=block_size, **rest)
        return PageCheck(inner, kv_caches, block_size, truth)

    config = {
        "model": tiny,
        "block_size": 4,
        "max_model_len": MAX_LEN,
        "kv_cache_bytes": (MAX_LEN // 4 + 1) * 2 * 2 * 4 * 2 * 16 * 4,  # one longest request
        "max_num_batched_tokens": MAX_LEN,
        "offload": {"cpu_bytes": "1MiB", "blocks_per_chunk": 1},
    }
    first, second = list(range(94)), list(range(94, 188))
    params = SamplingParams(max_tokens=1)
    with Engine(config, connect) as engine:
        results = [engine.generate([prompt], params)[0] for prompt in (first, second)]
        engine.connector.flush()
        results += engine.generate([first], params)
        assert engine.connector.checked["loaded"] > 0  # compared with what was computed before
    assert results[2].cached_tokens["CPU"] > 80
    assert results[0].token_ids == results[2].token_ids


def over_disk(model, root, **offload):
    """Return settings of an engine with a chunk a block, in host memory and on a disk."""
    disk = {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0}
    offload = {"cpu_bytes": "1MiB", "blocks_per_chunk": 1, "backends": [disk], **offload}
    settings = {"model": model, "max_model_len": MAX_LEN, "kv_cache_bytes": "256KiB"}
    return {**settings, "offload": offload}


HARM = {
    "deleted": (lambda file, other: file.unlink(), "read_missing"),
    "emptied": (lambda file, other: file.write_bytes(b""), "corrupt"),
    "truncated": (lambda file, other: file.write_bytes(file.read_bytes()[:-700]), "corrupt"),
    "one bit flipped": (lambda file, other: flip(file, -5, bit=4), "corrupt"),
    "another chunk's file": (lambda file, other: file.write_bytes(other.read_bytes()), "corrupt"),
    "not a chunk at all": (lambda file, other: file.write_bytes(b"x" * 9000), "corrupt"),
    "a folder in its place": (lambda file, other: (file.unlink(), file.mkdir()), ""),
}


def test_harmed_files_are_recomputed_and_their_reasons_counted(tiny, tmp_path):
    """Those of each prompt are harmed in another way."""
    config = {**over_disk(tiny, tmp_path), "block_size": 8}
    prompts = {harm: [(i * 7 + n) % 256 for i in range(88)] for n, harm in enumerate(HARM)}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, files = {}, {}
    with older_engine(tmp_path), Engine(config) as engine:  # so that small chunks are files
        for harm, prompt in prompts.items():
            (first[harm],) = engine.generate([prompt], params)
            wait_for_index(engine, 11 * len(first))
            known = {file for some in files.values() for file in some}
            files[harm] = sorted({*tmp_path.glob("*/??/*")} - known)
            assert len(files[harm]) == 11  # of 88 + 8 tokens; the last one's keys are not computed
    with Engine(config) as engine:
        wait_for_index(engine, 11 * len(HARM))
        before = Counter()
        for harm, (do, reason) in HARM.items():
            for file in files[harm][1:]:  # after the index was read: a load will be tried
                do(file, files[harm][0])
            (second,) = engine.generate([prompts[harm]], params)
            counted = reasons(stats(engine))
            (third,) = engine.generate([prompts[harm]], params)
            assert first[harm].token_ids == second.token_ids == third.token_ids, harm
            assert second.undelivered_tokens > 0, harm
            assert second.computed_prompt_tokens >= second.undelivered_tokens, harm
            news = counted - before
            assert sum(n for name, n in news.items() if reason in name) > 0, harm
            before = reasons(stats(engine))


@pytest.mark.parametrize("aborted", [True, False])
def test_a_load_that_hangs_ends_by_its_deadline_aborted_or_not(
    tiny, tmp_path, monkeypatch, aborted
):
    open_backend, hang = registry.open_backend, []
    monkeypatch.setattr(
        registry, "open_backend", lambda *a, **kw: FaultyBackend(open_backend(*a, **kw), *hang)
    )
    # The registry is patched in this process.
    config = over_disk(tiny, tmp_path, load_timeout_s=0.1, io="thread")
    prompt = list(range(80))
    with Engine(config) as engine:
        (right,) = engine.generate([prompt])
    hang.append(Plan("hang", frozenset(["read"])))
    with Engine(config) as engine:
        wait_for_index(engine, 4)
        name = engine.add_request(prompt)
        assert engine.step() == []
        assert engine.manager.usage > 0  # the load holds the blocks it is to fill
        if aborted:
            engine.abort(name)
            assert engine.manager.usage > 0  # still
        results = []
        while engine.has_requests:
            results += engine.step()
        assert engine.manager.usage == 0
        assert reasons(stats(engine))["failed_deadline"] > 0
    assert [r.finish_reason for r in results] == (["abort"] if aborted else ["length"])
    assert results[0].token_ids == (() if aborted else right.token_ids)


def test_what_the_last_request_stored_reaches_the_tiers_by_the_steps_of_an_idle_engine(
    tiny, tmp_path, until
):
    with Engine({**over_disk(tiny, tmp_path), "block_size": 8}) as engine:
        engine.generate([list(range(80))], SamplingParams(max_tokens=1))
        disk = engine.connector._spec.tiers["disk"]
        until(lambda: engine.step() == [] and disk.usage and disk.usage.chunks == 10)


def wait_for_index(engine, chunks):
    assert engine.connector.flush()  # of an idle engine nothing takes in that a copy has ended
    until = time.monotonic() + 60
    disk = engine.connector._spec.tiers["disk"]
    while disk.usage is None or disk.usage.chunks < chunks or not disk.is_complete:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_restarted_engine_goes_on_from_disk_with_bit_equal_pages(tiny, tmp_path):
    workload, truth = Workload(tiny, 5, tmp_path), {}
    workload.offload["backends"] = [
        {"type": "disk", "root": str(tmp_path), "capacity": "64MiB", "min_free": 0}
    ]
    workload.offload["lookup_timeout_s"] = 10.0  # until the folder is listed, however long it takes
    expected = workload.expected(truth)
    workload.run(truth)
    results, counts = workload.run(truth)
    same_outputs(results, expected)
    assert counts["from disk"] > 0
    assert counts["loaded"] > 0


def test_a_wrong_page_would_show_in_the_tokens(tiny):
    """The control of the tests above: their outputs do depend on what is in the cache."""
    shown, params = 0, SamplingParams(max_tokens=8)
    for seed in range(10):
        draw = random.Random(seed)
        prompt = [draw.randrange(256) for _ in range(80)]
        config = {
            "model": tiny,
            "block_size": 8,
            "max_model_len": MAX_LEN,
            "kv_cache_bytes": "256KiB",
        }
        with Engine(config) as engine:
            right = engine.generate([prompt], params)[0].token_ids
            for cache in engine.runner.canonical_kv_caches().tensors:
                cache.tensor[3] = cache.tensor[2]  # one block of ten, with a neighbour's bytes
            shown += engine.generate([prompt], params)[0].token_ids != right
    assert shown >= 8
