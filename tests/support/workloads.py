"""Random workloads for the demo engine, and a connector that compares every page it sees."""

import random
import time
from collections import Counter

import torch

from kvoffload.connectors.local import LocalConnector
from kvoffload.demo import Engine, SamplingParams
from kvoffload.demo.offloading import NoOffloading
from tests.support.block_checks import check_manager
from tests.support.disk_chunks import stored_in
from tests.support.manager_check import check

MAX_LEN = 96
PATIENCE_S = 60.0
"""A workload that takes longer hangs; the usual time is a tenth of a second."""


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
            "io": "thread",
            "load_timeout_s": 1.0,
            "store_timeout_s": 0.5,
            "lookup_timeout_s": 0.02,
        }
        if draw.random() < 0.85:
            self.offload["backends"].append(
                {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0}
            )
        self.requests = self._requests()

    def in_form(self, form):
        """The I/O server in this form; a process takes longer to answer."""
        self.offload["io"] = form
        if form == "process":
            slow = dict.fromkeys(("load_timeout_s", "store_timeout_s", "lookup_timeout_s"), 10.0)
            self.offload |= slow

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
            check(engine.connector)
            counts.update(engine.connector.checked)
            counts.update({f"from {k}": n for k, n in stats(engine)["hit_tokens"].items()})
            counts.update(reasons(stats(engine)))


def stats(engine):
    return engine.connector.stats()


def reasons(statistics):
    """All counted reasons for what went wrong, from transfers and tiers."""
    failed = statistics["transfer_failures"]
    counted = Counter({f"failed_{reason}": count for reason, count in failed.items()})
    for counters in statistics.get("tier_events", {}).values():
        counted.update(counters)
    for checks in statistics.get("corrupt_chunks", {}).values():
        counted.update({f"corrupt_{check}": count for check, count in checks.items()})
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


def damage(draw, root):
    """Now and then, do to some stored chunk what a disk, an operator or another program may do."""
    chunks = stored_in(root) if draw.random() < 0.25 else []
    if not chunks:
        return
    chunk, other = draw.choice(chunks), draw.choice(chunks)
    kind = draw.randrange(5)
    try:
        data = bytearray(chunk.content()) or bytearray(1)
        if kind == 0:
            chunk.wipe()
        elif kind == 1:
            chunk.cut(draw.randrange(len(data)))
        elif kind == 2:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            chunk.overwrite(0, data)
        elif kind == 3:
            chunk.overwrite(0, other.content())
        else:
            chunk.cut(0)
    except FileNotFoundError:
        pass  # the engine was quicker
