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
import torch

from kvoffload import registry
from kvoffload.connectors.local import LocalConnector
from kvoffload.demo import Engine, SamplingParams
from kvoffload.demo.offloading import NoOffloading
from kvoffload.errors import ConfigError
from kvoffload.testing import FaultyBackend, Plan
from kvoffload.transfer.cpu.copier import CpuCopier
from tests.support.block_checks import check_manager

MAX_LEN = 96
RANDOM, DAMAGED, MISBEHAVING, WITHOUT_HOST = 120, 40, 20, 20
"""Workloads of each kind."""
PER_TEST = 40
PATIENCE_S = 60.0
"""A workload that takes longer hangs; the usual time is a tenth of a second."""


class FaultyAsyncBackend(FaultyBackend):
    """Without optional protocols: whether a chunk is there is known some steps later only."""

    def __getattr__(self, name):
        raise AttributeError(name)


class PageCheck:
    """A connector around another that compares all pages it sees with those seen before."""

    def __init__(self, inner, kv_caches, block_size, truth):
        self.inner = inner
        self.tensors = [t.tensor for t in kv_caches.tensors]
        self.block_size = block_size
        self.truth = truth
        self.loading = {}
        self.compared = {}
        self.checked = Counter()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _compare(self, what, hashes, blocks):
        for block_hash, block in zip(hashes, blocks, strict=True):
            page = torch.cat([t[block] for t in self.tensors])
            assert torch.equal(page, self.truth.setdefault(block_hash, page)), what
            self.checked[what] += 1

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        first = request.num_computed_tokens // self.block_size
        self.loading[request.request_id] = (first, list(block_ids[0]), list(request.block_hashes))
        self.inner.update_state_after_alloc(request, block_ids, num_external_tokens)

    def poll(self):
        outcomes = self.inner.poll()
        for outcome in outcomes:
            first, blocks, hashes = self.loading.pop(outcome.request_id)
            end = first + outcome.num_loaded_tokens // self.block_size
            self._compare("loaded", hashes[first:end], blocks[first:end])
        return outcomes

    def after_forward(self, request, block_ids, num_computed_tokens):
        full = num_computed_tokens // self.block_size
        first = self.compared.get(request.request_id, 0)  # each block when it is new
        first = first if first <= full else 0  # ...and again after a preemption
        self.compared[request.request_id] = full
        self._compare("computed", request.block_hashes[first:full], block_ids[0][first:full])
        self.inner.after_forward(request, block_ids, num_computed_tokens)


class Workload:
    """A seed's settings and requests, and how to run them."""

    def __init__(self, tiny, seed, root):
        self.draw = draw = random.Random(seed)
        self.root = root
        self.block_size = draw.choice([2, 4, 8])
        per_chunk = draw.choice([1, 1, 2, 3])
        page = 2 * self.block_size * tiny["num_kv_heads"] * tiny["head_size"] * 4
        block = page * tiny["num_layers"]
        longest = MAX_LEN // self.block_size + 1
        self.config = {
            "model": tiny,
            "seed": seed % 7,
            "block_size": self.block_size,
            "max_model_len": MAX_LEN,
            "kv_cache_bytes": int(block * longest * draw.choice([1, 1, 1.3])),
            "max_num_seqs": 6,
            "max_num_batched_tokens": draw.choice([7, 24, 96]),
        }
        self.chunk_bytes = -(-block * per_chunk // 4096) * 4096
        self.offload = {
            "cpu_bytes": self.chunk_bytes * draw.choice([1, 3, 8, 60]),
            "blocks_per_chunk": per_chunk,
            "backends": [],
            "load_timeout_s": 1.0,
            "store_timeout_s": 0.5,
            "lookup_timeout_s": 0.02,
        }
        if draw.random() < 0.85:
            self.offload["backends"].append(
                {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0}
            )
        self.requests = self._requests()

    def without_host_cache(self, slots):
        """Chunks only pass through host memory, to a disk and back."""
        self.offload |= {
            "cpu_bytes": 0,
            "staging_bytes": slots * self.chunk_bytes,
            "backends": [
                {"type": "disk", "root": str(self.root), "capacity": "64MiB", "min_free": 0}
            ],
        }

    def _requests(self):
        """Conversations that share openings and come back longer: (step, tokens, params)."""
        draw, requests = self.draw, []
        opening = [draw.randrange(256) for _ in range(30)]
        talks = [
            opening[: draw.choice([0, 11, 30])]
            + [draw.randrange(256) for _ in range(draw.randint(5, 25))]
            for _ in range(5)
        ]
        for number in range(10):
            which = draw.randrange(5)
            params = SamplingParams(
                max_tokens=draw.randint(1, 12), temperature=draw.choice([0, 1]), seed=number
            )
            requests.append((draw.randint(0, 30), list(talks[which]), params))
            talks[which] += [draw.randrange(256) for _ in range(draw.randint(0, 12))]
            del talks[which][MAX_LEN - 16 :]
        return requests

    def expected(self, truth):
        """Tokens and pages without offloading, from an engine with room for everything."""

        def connect(_, kv_caches, *, block_size, **rest):
            return PageCheck(NoOffloading(), kv_caches, block_size, truth)

        config = {
            **self.config,
            "kv_cache_bytes": "2MiB",
            "max_num_batched_tokens": 512,
            "offload": {"cpu_bytes": 0},
        }
        with Engine(config, connect) as engine:
            prompts = [tokens for _, tokens, _ in self.requests]
            results = engine.generate(prompts, [params for _, _, params in self.requests])
        return [result.token_ids for result in results]

    def run(self, truth, *, restarts=0, meanwhile=lambda engine: None):
        """Serve the requests, some of which are aborted; returns results and counts.

        ``meanwhile`` is called before each step, and may do harm.
        """
        todo = sorted(range(len(self.requests)), key=lambda i: self.requests[i][0])
        aborts = {i: self.draw.randint(0, 12) for i in todo if self.draw.random() < 0.2}
        results, counts = {}, Counter()
        share = -(-len(todo) // (restarts + 1))
        for start in range(0, len(todo), share):
            part = todo[start : start + share]
            self._serve(part, aborts, results, counts, truth, meanwhile)
        return results, counts

    def _serve(self, todo, aborts, results, counts, truth, meanwhile):
        def connect(settings, kv_caches, *, block_size, **rest):
            inner = LocalConnector(settings, kv_caches, block_size=block_size, **rest)
            return PageCheck(inner, kv_caches, block_size, truth)

        todo, give_up_at, step = list(todo), time.monotonic() + PATIENCE_S, 0
        with Engine({**self.config, "offload": self.offload}, connect) as engine:
            while todo or engine.has_requests:
                assert time.monotonic() < give_up_at, f"hangs: {engine.connector.stats()}"
                while todo and (self.requests[todo[0]][0] <= step or not engine.has_requests):
                    _, tokens, params = self.requests[todo[0]]
                    engine.add_request(tokens, params, str(todo.pop(0)))
                for number, delay in aborts.items():
                    if step == self.requests[number][0] + delay:
                        engine.abort(str(number))
                meanwhile(engine)
                for result in engine.step():
                    results[int(result.request_id)] = result
                    counts["preempted"] += result.preemptions
                    counts["undelivered"] += result.undelivered_tokens
                step += 1
            check_manager(engine.manager)
            assert engine.manager.usage == 0
            engine.connector.flush()
            engine.connector.check()
            counts.update(engine.connector.checked)
            counts.update({f"from {k}": n for k, n in stats(engine)["loaded_tokens"].items()})
            counts.update(reasons(stats(engine)))


def stats(engine):
    return engine.connector.stats()


def reasons(statistics):
    """All counted reasons for what went wrong, from transfers and tiers."""
    counted = Counter(statistics["transfers"])
    for tier in statistics["tiers"].values():
        counted.update(tier["counters"])
    return counted


def same_outputs(results, expected):
    """Whole answers are equal; those of aborted requests are beginnings of the expected ones."""
    for number, result in results.items():
        whole = expected[number]
        if result.finish_reason == "abort":
            assert result.token_ids == whole[: len(result.token_ids)]
        else:
            assert result.token_ids == whole
    assert len(results) == len(expected)


def chunk_files(root):
    return sorted(p for p in root.glob("*/??/*") if p.parent.parent.name[0] != ".")


def damage(draw, root):
    """Now and then, do to some stored chunk what a disk, an operator or another program may do."""
    files = chunk_files(root) if draw.random() < 0.25 else []
    if not files:
        return
    file, other = draw.choice(files), draw.choice(files)
    kind = draw.randrange(5)
    try:
        data = bytearray(file.read_bytes()) or bytearray(1)
        if kind == 0:
            file.unlink()
        elif kind == 1:
            file.write_bytes(data[: draw.randrange(len(data))])
        elif kind == 2:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        elif kind == 3:
            file.write_bytes(other.read_bytes())
        else:
            file.write_bytes(b"")
    except FileNotFoundError:
        pass  # the engine was quicker


@pytest.fixture
def total():
    """Counts over a test's workloads, to see that they met what they are meant to meet."""
    return Counter()


@pytest.mark.parametrize("first", range(0, RANDOM, PER_TEST))
def test_random_workloads_give_the_tokens_and_pages_of_no_offloading(tiny, tmp_path, total, first):
    for seed in range(first, first + PER_TEST):
        workload, truth = Workload(tiny, seed, tmp_path / str(seed)), {}
        expected = workload.expected(truth)
        results, counts = workload.run(truth, restarts=seed % 2)
        same_outputs(results, expected)
        total.update(counts)
    assert total["loaded"] > 0
    assert total["preempted"] > 0
    assert total["from CPU"] > 0
    assert total["from DISK"] > 0


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
    assert total["from DISK"] > 0
    assert total["from CPU"] == 0
    assert (sum(store.struck for store in opened) > 0) == misbehaving


@pytest.mark.parametrize("first", range(0, DAMAGED, PER_TEST))
def test_files_damaged_meanwhile_change_no_token(tiny, tmp_path, total, first):
    for seed in range(1000 + first, 1000 + first + PER_TEST):
        root = tmp_path / str(seed)
        workload, truth = Workload(tiny, seed, root), {}
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


def test_stores_that_misbehave_change_no_token(tiny, tmp_path, monkeypatch, total):
    opened = []

    def open_faulty(*args, **kwargs):
        kind = draw.choice([FaultyBackend, FaultyAsyncBackend])
        opened.append(kind(open_backend(*args, **kwargs), *plans))
        return opened[-1]

    open_backend = registry.open_backend
    monkeypatch.setattr(registry, "open_backend", open_faulty)
    for seed in range(2000, 2000 + MISBEHAVING):
        draw = random.Random(seed)
        faults = [draw.choice(READ_FAULTS), draw.choice(WRITE_FAULTS)]
        plans = [Plan(f, frozenset(v), every=draw.randint(1, 2), seconds=0.005) for f, v in faults]
        workload, truth = Workload(tiny, seed, tmp_path / str(seed)), {}
        # Little host memory over a disk: most loads have to come from the store that misbehaves.
        workload.offload |= {
            "cpu_bytes": 3 * workload.chunk_bytes,
            "backends": [
                {"type": "disk", "root": str(workload.root), "capacity": "64MiB", "min_free": 0}
            ],
            "load_timeout_s": 0.02,
            "store_timeout_s": 0.02,
        }
        expected = workload.expected(truth)
        results, counts = workload.run(truth, restarts=1)
        same_outputs(results, expected)
        total.update(counts)
    assert sum(backend.struck for backend in opened) > 0
    assert total["undelivered"] > 0
    assert sum(n for reason, n in total.items() if reason.startswith("failed_")) > 0


class LateFence:
    """A fence that is reached some time after the one it stands for."""

    error = None

    def __init__(self, inner, seconds):
        self.inner, self.seconds = inner, seconds

    def done(self):
        return False

    def wait(self, timeout_s=None):
        time.sleep(self.seconds)
        return self.inner.wait(timeout_s)


def test_blocks_written_again_before_a_late_store_read_them_are_stored_right(tiny, monkeypatch):
    """The second prompt needs the very blocks that the first one's store has yet to read."""
    launch = CpuCopier.launch
    monkeypatch.setattr(
        CpuCopier,
        "launch",
        lambda self, moves, to_host, after: launch(self, moves, to_host, LateFence(after, 0.2)),
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
        "offload": {"cpu_bytes": "1MiB"},
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


HARM = {
    "deleted": (lambda file, other: file.unlink(), "read_missing"),
    "emptied": (lambda file, other: file.write_bytes(b""), "corrupt"),
    "truncated": (lambda file, other: file.write_bytes(file.read_bytes()[:-700]), "corrupt"),
    "one bit flipped": (lambda file, other: flip(file), "corrupt"),
    "another chunk's file": (lambda file, other: file.write_bytes(other.read_bytes()), "corrupt"),
    "not a chunk at all": (lambda file, other: file.write_bytes(b"x" * 9000), "corrupt"),
    "a folder in its place": (lambda file, other: (file.unlink(), file.mkdir()), ""),
}


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize("harm", HARM)
def test_a_harmed_file_is_recomputed_and_its_reason_counted(tiny, tmp_path, harm):
    do, reason = HARM[harm]
    config = {
        "model": tiny,
        "block_size": 8,
        "max_model_len": MAX_LEN,
        "kv_cache_bytes": "256KiB",
        "offload": {
            "cpu_bytes": "1MiB",
            "backends": [{"type": "disk", "root": str(tmp_path), "capacity": "64MiB"}],
        },
    }
    prompt = [i * 7 % 256 for i in range(88)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with Engine(config) as engine:
        (first,) = engine.generate([prompt], params)
    files = chunk_files(tmp_path)
    assert len(files) == 11  # of 88 + 8 tokens; the last one's keys are never computed
    with Engine(config) as engine:
        wait_for_index(engine, len(files))
        for file in files:  # after the index was read: a load will be tried
            if file != files[0]:
                do(file, files[0])
        (second,) = engine.generate([prompt], params)
        counted = reasons(stats(engine))
        (third,) = engine.generate([prompt], params)
    assert first.token_ids == second.token_ids == third.token_ids
    assert second.undelivered_tokens > 0
    assert second.computed_prompt_tokens >= second.undelivered_tokens
    assert sum(n for name, n in counted.items() if reason in name) > 0


@pytest.mark.parametrize("aborted", [True, False])
def test_a_load_that_hangs_ends_by_its_deadline_aborted_or_not(
    tiny, tmp_path, monkeypatch, aborted
):
    open_backend, hang = registry.open_backend, []
    monkeypatch.setattr(
        registry, "open_backend", lambda *a, **kw: FaultyBackend(open_backend(*a, **kw), *hang)
    )
    config = {
        "model": tiny,
        "max_model_len": MAX_LEN,
        "kv_cache_bytes": "256KiB",
        "offload": {
            "cpu_bytes": "1MiB",
            "backends": [{"type": "disk", "root": str(tmp_path), "capacity": "64MiB"}],
            "load_timeout_s": 0.1,
        },
    }
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


def wait_for_index(engine, chunks):
    until = time.monotonic() + 10
    while stats(engine)["tiers"]["disk"]["chunks"] < chunks:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_restarted_engine_goes_on_from_disk_with_bit_equal_pages(tiny, tmp_path):
    workload, truth = Workload(tiny, 5, tmp_path), {}
    workload.offload["backends"] = [
        {"type": "disk", "root": str(tmp_path), "capacity": "64MiB", "min_free": 0}
    ]
    expected = workload.expected(truth)
    workload.run(truth)
    results, counts = workload.run(truth)
    same_outputs(results, expected)
    assert counts["from DISK"] > 0
    assert counts["loaded"] > 0


def test_other_weights_find_nothing_of_these(tiny, tmp_path):
    config = {
        "model": tiny,
        "max_model_len": MAX_LEN,
        "kv_cache_bytes": "256KiB",
        "offload": {
            "cpu_bytes": "1MiB",
            "backends": [{"type": "disk", "root": str(tmp_path), "capacity": "64MiB"}],
        },
    }
    prompt = list(range(90))
    with Engine(config) as engine:
        engine.generate([prompt], SamplingParams(max_tokens=2))
    with Engine({**config, "seed": 1}) as engine:
        time.sleep(0.05)
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=2))
    assert result.computed_prompt_tokens == 90


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


@pytest.mark.parametrize(
    ("offload", "field"),
    [
        ({"cpu_bytes": "1MiB", "cpu_byte": 1}, "cpu_byte"),
        ({"cpu_bytes": 16}, "cpu_bytes"),
        ({"cpu_bytes": "1MiB", "backends": [{"type": "tape"}]}, "backends[0].type"),
        ({"cpu_bytes": "1MiB", "policy": "best"}, "policy"),
    ],
)
def test_bad_offloading_settings_are_refused_at_start(tiny, offload, field):
    with pytest.raises(ConfigError) as caught:
        Engine({"model": tiny, "max_model_len": 96, "kv_cache_bytes": "1MiB", "offload": offload})
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_folder_that_cannot_be_written_is_refused_at_start(tiny, tmp_path):
    (tmp_path / "file").write_text("in the way")
    root = str(tmp_path / "file" / "kv")
    offload = {"cpu_bytes": "1MiB", "backends": [{"type": "disk", "root": root}]}
    with pytest.raises(ConfigError) as caught:
        Engine({"model": tiny, "max_model_len": 96, "kv_cache_bytes": "1MiB", "offload": offload})
    assert "root" in caught.value.field
    assert root in str(caught.value)
