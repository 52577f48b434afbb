"""One run of the model: all that it does follows from a seed, but for the times it takes.

``python -m tests.support.random_model.model SEED [SECONDS]`` runs one by itself.
"""

import faulthandler
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from kvoffload.backends.folder.evictor import DEAD_S
from kvoffload.backends.folder.upkeep import LEASE_S
from kvoffload.io import backoff
from kvoffload.io import client as io_client
from kvoffload.io import server as io_server
from kvoffload.io.service.host_chunk import BLOCK, blocks_of
from kvoffload.transfer.layout import ChunkLayout
from tests.support import redis_server
from tests.support.host_server import ROOT, HostServer
from tests.support.random_model import hostile, sums
from tests.support.random_model.cache import KINDS, Memory
from tests.support.random_model.engine import (
    MODELS,
    MOST_GROWTH,
    PLAIN,
    VOCABULARY,
    ModelEngine,
    changeable,
    rough,
)
from tests.support.random_model.faults import Faults, new_key, write_keys
from tests.support.random_model.late_copies import LateCopier, install
from tests.support.random_model.pages import PageEngine
from tests.support.random_model.spoiled import WAYS, spoil
from tests.support.service_manager import ServiceManager

STRIKES_A_SECOND = 5
REST_EVERY_S = 2.0
LONGER_S = 120.0
STORES_S = sums.REST_S + LEASE_S + DEAD_S
"""A killed process of a folder keeps its lease for a while, and what it may have stored."""
MOST_BYTES = 256 << 20
"""Of a tier."""
REDIS_BYTES = 2 << 20
"""What a server takes for itself."""
RETURNS = (
    {"returns": "never"},
    {"returns_in_s": 9000.0},
    {"session": "a", "returns_in_s": 1e18},
    {"session": "a", "returns": "hours"},
)
"""What requests say of their session's next one."""


class Model:
    """An engine over random tiers with random settings; several of them on a server of the host.

    Args:
        seed: decides everything.
        folder: for the tiers.
    """

    def __init__(self, seed, folder):
        self.draw = draw = random.Random(seed)
        self.folder = folder
        self.kind = draw.choice(list(KINDS))
        self.memory = Memory(KINDS[self.kind], draw.choice((64, 120)))
        self.control = hostile.Control(str(folder / "control"), seed)
        self.control.set()
        LateCopier.control = self.control
        LateCopier.has_streams = draw.random() < 0.3
        LateCopier.lag_s = draw.choice((0.0, 0.001, 0.01))
        self.roots = []
        self.server = self.host = self.manager = None
        self.encrypted, self.key_files = [], []
        self.capacities = {}
        """Root of a disk tier → the most that any settings of it allow."""
        self.settings = self._settings(folder)
        self.engine = ModelEngine(draw, self.memory, self.settings)
        """The one that the model looks at."""
        self.engines = [self.engine, *self._others()]
        self.pages = PageEngine(draw, self.settings, self.kind) if draw.random() < 0.5 else None
        struck = self.engines, self.control, self.roots, self.server, self.host, self.pages
        self.faults = Faults(draw, *struck)
        self.faults.key_files += self.key_files
        self.held = sums.Held()
        self.compared_while_struck = 0
        self.has_rested = False
        self._stores = self.roots, self.server, self.host
        if self.pages is not None:
            self.pages.stores = self._stores
        self._prefixes = [self._tokens(draw.randint(8, 60)) for _ in range(6)]

    def _settings(self, folder):
        draw, per_chunk = self.draw, self.draw.choice((1, 2, 4))
        layout = ChunkLayout(self.memory.caches, [per_chunk] * len(self.memory.kind.groups))
        chunk_bytes = layout.slot_bytes
        keeps = draw.random() < 0.7
        # Chunks of each size pass through the share of each tier.
        host_bytes = draw.choice((12, 30, 100) if keeps else (24, 40, 100)) * chunk_bytes
        tiers = self._tiers(folder, chunk_bytes)
        attached = draw.random() < 0.25
        if attached:
            self.host = self._serve(folder, chunk_bytes, tiers)
        where = {"serve": self.host.path} if attached else {"backends": tiers}
        return {
            **where,
            "cpu_bytes": host_bytes if keeps else 0,
            "staging_bytes": host_bytes,
            **changeable(draw, keeps, per_chunk),
            "blocks_per_chunk": per_chunk,
            "io": draw.choice(("thread", "process")),
            "client_hints": ["tiers", "session", "returns", "returns_in_s"],
            "lookup_timeout_s": 0.3,
            "load_timeout_s": 0.6,
            "store_timeout_s": 0.6,
        }

    def _others(self):
        """Start engines of the same model, and of another one, on the same server or tiers."""
        draw, keeps, others = self.draw, bool(self.settings["cpu_bytes"]), []
        for model in draw.choice(([], [], MODELS[:1], MODELS[1:], MODELS)):
            memory = Memory(self.memory.kind, self.memory.num_blocks)
            settings = self.settings | changeable(draw, keeps, self.settings["blocks_per_chunk"])
            others.append(ModelEngine(draw, memory, settings, model))
        return others

    def _serve(self, folder, chunk_bytes, tiers):
        """Start a server of the host, in whose memory namespaces have shares."""
        memory = self.draw.choice((40, 200)) * blocks_of(chunk_bytes) * BLOCK
        shares = {
            "namespace_min": self.draw.choice((0, memory // 4)),
            "namespace_max": self.draw.choice((memory // 2, memory)),
        }
        policy, lends = self.draw.choice(("lru", "handicap")), self.draw.random() < 0.8
        settings = {"memory": memory, "policy": policy, "lend": lends, "backends": tiers, **shares}
        (folder / "host").mkdir()
        if self.draw.random() < 0.5:  # the next server goes on with the memory of the last one
            self.manager = ServiceManager(folder / "host")
        host = HostServer(folder / "host", self.manager, **settings)
        while self.manager is not None and not self.manager.kept:  # a descriptor more
            self.manager.take_messages()
            time.sleep(0.01)
        return host

    def _tiers(self, folder, chunk_bytes):
        draw, tiers = self.draw, []
        names = ("memory", "rough", "hostile", "shy", "folder")
        names += ("redis",) if redis_server.BINARY else ()
        chosen = draw.sample(names, draw.choice((1, 2, 2, 3)))
        if "rough" not in chosen and draw.random() < 0.4:  # engines of pages read it in place
            chosen[-1] = "rough"
        verified = [name for name in names if name in ("rough", "folder", "redis")]
        encrypted = {name for name in verified if draw.random() < 0.4}
        if not {*verified} & {*chosen} - encrypted and draw.random() < 0.8:
            encrypted -= {plain := draw.choice(verified)}  # else no checksum guards a chunk
            chosen += {plain} - {*chosen}
        for name in chosen:
            root = folder / name
            num_chunks = min(draw.choice((20, 60, 200, 600)), MOST_BYTES // chunk_bytes)
            tier = {"type": name}
            if name == "memory":
                tier["capacity"] = num_chunks * chunk_bytes
            elif name == "redis":
                tier |= self._redis(root, num_chunks * chunk_bytes)
            else:
                tier["root"] = str(root)
                self.roots.append(root)
            if name in ("rough", "hostile", "shy"):
                tier["control"] = str(folder / "control")
            if name == "folder":
                capacity = num_chunks * (chunk_bytes + 8192)
                tier |= {"capacity": capacity, "timeout_s": 0.3, "threads": sums.FOLDER_THREADS}
            if name in encrypted:
                self.key_files.append(path := folder / f"{name}.keys")
                write_keys(path, [new_key(draw)])
                tier["encryption"] = {"key_file": str(path)}
                self.encrypted.append(root)
            if name in ("rough", "folder"):
                tier["tenant_share"] = draw.choice((0.4, 1.0))
            if name == "rough":
                capacity = num_chunks * (chunk_bytes + 8192)
                self.capacities[root] = MOST_GROWTH * capacity
                tier |= {"capacity": capacity, "min_free": 0, **rough(draw)}
                tier["io"] = draw.choice(("auto", "direct", "buffered"))
            tiers.append(tier)
        return tiers

    def _redis(self, folder, capacity):
        """Start a server; as many connections from the first rest on as ever."""
        size = str(REDIS_BYTES + capacity)
        limits = ("--maxmemory", size, "--maxmemory-policy", "allkeys-lru")
        self.server = redis_server.RedisServer(folder, *limits)
        return {"url": self.server.url, "timeout_s": 0.3, "connections": 1}

    def _tokens(self, count):
        return [self.draw.randrange(VOCABULARY) for _ in range(count)]

    # ---- a run ----

    def run(self, seconds):
        """Serve and be struck, with rests at which everything must add up."""
        self.rest()
        until_s = time.monotonic() + seconds
        while self._goes_on(until_s):
            self.engine = self.draw.choice(self.engines)
            before = self._compared()
            if self.pages is not None:
                self.pages.begin()
            if self.draw.random() < 0.5:
                self._endure()
            else:
                self._be_struck(time.monotonic() + self.draw.uniform(0.3, 2 * REST_EVERY_S))
            self._reset_midway()
            self._tell()
            self.compared_while_struck += self._compared() - before
            self.faults.end()
            if self.pages is not None:
                self.pages.end()
            self.rest()
        self.close()

    def _compared(self):
        return sum(engine.counts["compared"] for engine in self.engines)

    def _goes_on(self, until_s):
        """Longer on a busy machine, where nothing may have been compared so far."""
        return time.monotonic() < until_s + LONGER_S * (not self.compared_while_struck)

    def _be_struck(self, until_s):
        strike_at_s = 0.0
        while (now_s := time.monotonic()) < until_s:
            engine = self.draw.choice(self.engines)
            if len(engine.waiting) < 8 and self.draw.random() < 0.3:
                prompt = self.draw.choice(self._prefixes) + self._tokens(self.draw.randint(1, 20))
                tokens = prompt[: self.draw.randint(9, 80)]
                told = self.draw.choice(({}, {}, *RETURNS))  # all later than the model ends
                engine.add(tokens, self.draw.choice((0, 1, 9)), **told)
            if now_s >= strike_at_s:
                strike_at_s = now_s + self.draw.expovariate(STRIKES_A_SECOND)
                self.faults.strike()
            for each in self.engines:
                each.step()
                sums.check_shares(each)
            time.sleep(0.0005)

    def _endure(self):
        """Let all calls of a tier hang through loads and resets: it keeps its shares, no more."""
        settings = self.settings if self.host is None else self.host.settings
        names = [tier["type"] for tier in settings["backends"]]
        if not (hangable := [name for name in names if name in hostile.HANGS]):
            return
        hung = self.draw.choice(hangable)
        self.faults.log.append(f"endure {hung}")
        prompts = [self._small_prompt() for _ in range(14)]
        for prompt in prompts * self.engine.settings["store_threshold"]:
            self.engine.add(prompt)
            self._finish_all()
        self.engine.forget_kept()
        self.control.set(hung=1 + hostile.HANGS.index(hung))
        self._add(prompts)
        self._serve_until(time.monotonic() + 0.7)
        for _ in range(3):
            prompts = [self._small_prompt() for _ in range(8)]
            self._add(prompts * self.engine.settings["store_threshold"])
            self._serve_until(time.monotonic() + 0.3)
            self.engine.reset(waits=False)

    def _small_prompt(self):
        """One whose chunks take about a tenth of host memory."""
        num_slots, groups = self.engine.connector._spec.num_slots, len(self.memory.kind.groups)
        chunks = max(1, num_slots // (10 * groups))
        return self._tokens(min(60, chunks * self.engine.chunk_tokens) + 1)

    def _reset_midway(self):
        """Reset while prompts are computed, and while they are loaded; then ask for them again."""
        engine, draw = self.engine, self.draw
        self.faults.log.append("reset midway")
        self.faults.heal()
        self._finish_all()
        prompts = [self._tokens(draw.randint(30, 60)) for _ in range(3)]
        self._add(prompts)
        for _ in range(draw.randint(1, 4)):
            engine.step()
        engine.reset(waits=draw.random() < 0.5)
        for _ in range(self.engine.settings["store_threshold"] + 1):
            self._finish_all()
            engine._drop_cached(len(engine._cached))
            self._add(prompts)
        self._finish_all()
        self.engine.forget_kept()
        self._add(prompts)
        engine.step()
        if engine.loading and draw.random() < 0.5:
            request = draw.choice(list(engine.loading.values()))
            engine.preempt(request)
            engine.abort(request)
        engine.reset(waits=False)
        self._finish_all()

    def _tell(self):
        """Queue requests, and end some that return; a store that opens since knows it all.

        Jobs in flight, the store's own queue and a clogged link may come between.
        """
        engine, draw = self.engine, self.draw
        told, others = self.folder / "hostile" / "told", [*self.engines[1:], self.pages]
        if not told.exists() or any(others):
            return
        self.faults.log.append("tell")
        self.faults.heal()
        self._finish_all()
        self._await(lambda: not engine.connector._spec.io._is_opening, "a tier stays closed")
        client = engine.connector._spec.io
        before = {*client._returns._told}
        for _ in range(3):
            engine.add(self._tokens(40), session="s", returns="hours")
        self._finish_all()
        self._add([self._tokens(draw.randint(20, 60)) for _ in range(4)])
        engine.connector.poll()
        act = draw.choice((self.faults.kill, self.faults.pause, lambda: engine.reset(waits=False)))
        act()
        if draw.random() < 0.5:
            engine.abort(draw.choice(engine.waiting))
        needed, claims = set(), set()

        def is_told():
            nonlocal needed, claims
            needed = {key.hex() for keys in client._awaited.values() for key in keys}
            claims = {claim.hex() for claim in {*client._returns._told} - before}
            spared, known = json.loads(told.read_text())
            return set(spared) == needed and claims <= set(known)

        self._await(is_told, "a store does not know what was told")
        if self.engine.settings["waiting_share"] and self.memory.kind.keeps_prefixes:
            queued = [request for request in engine.waiting if request.is_told]
            expected = {key.hex() for request in queued for key in self._keys(request)}
            assert expected <= needed, "the queue is not told"
        assert len(claims) == 3, "what sessions say is not told"

    def _add(self, prompts):
        for prompt in prompts:
            self.engine.add(prompt)

    def _serve_until(self, until_s):
        while time.monotonic() < until_s:
            self.engine.step()
            sums.check_shares(self.engine)
            time.sleep(0.0005)

    def rest(self):
        """End all requests; then everything adds up, and each tier stores and loads again."""
        for step in (self._become_quiet, self._serve_again):
            for engine in self.engines:
                self.engine = engine
                step()
        if self.pages is not None:
            self._let_pages_rest()
        self.held.check()
        self._check_tiers()
        self.has_rested = True

    def _become_quiet(self):
        self._finish_all()
        sums.await_quiet(self.engine)

    def _serve_again(self):
        client = self.engine.connector._spec.io
        self._await(lambda: not client._is_opening, "a tier stays closed")
        for tier in self.engine.connector._spec.tiers.values():
            self._await(
                partial(self._stores_and_loads_on, tier, self._ways()),
                partial("{0.name} stores or loads nothing: {0.usage} {0.counters}".format, tier),
                STORES_S,
            )
        sums.await_quiet(self.engine)

    def _let_pages_rest(self):
        pages = self.pages
        self._await(lambda: not pages.left(), pages.left)
        stores_and_loads = partial(pages.stores_and_loads, self._ways())
        self._await(stores_and_loads, "pages are not stored or not loaded", STORES_S)
        self._await(lambda: not pages.left(), pages.left)
        pages.check()

    def _finish_all(self):
        """End all requests; on a busy machine that takes as long as one ends after the other."""
        engine, least, until_s = self.engine, sys.maxsize, 0.0
        tables = engine.waiting, engine.running, engine.loading, engine._doomed
        while left := sum(map(len, tables)):
            if left < least:
                least, until_s = left, time.monotonic() + sums.REST_S
            engine.step()
            assert time.monotonic() < until_s, f"{left} requests do not end"
        assert engine.connector.flush(sums.REST_S), "transfers do not end"

    def _stores_and_loads_on(self, tier, ways):
        """Return whether a tier takes a new prompt of its own, and some of it comes back.

        Through little memory not each chunk gets to it, and a folder for a few of them has no room
        in time. The first prompts are spoiled before their loads, in these ways.
        """
        connector, chunk = self.engine.connector, self.engine.chunk_tokens
        most = chunk + 1 if ways else max(40, chunk + 1)
        prompt = self._tokens(self.draw.randint(chunk + 1, most))
        for _ in range(self.engine.settings["store_threshold"]):
            request = self.engine.add(prompt, tiers=[tier.name])
            self._finish_all()
            self.engine._drop_cached(len(self.engine._cached))
        connector.poll()
        first = self._keys(request)[0]
        self._await(lambda: tier.holds(first) is not None, "a lookup hangs")
        if not tier.holds(first):
            return False
        if is_spoiled := bool(ways):
            self._spoil(tier, request, ways.pop())
        self.engine.forget_kept()  # of host memory alone
        before = self.engine.counts["tokens"]
        self.engine.add(prompt)
        self._finish_all()
        return self.engine.counts["tokens"] > before and not is_spoiled

    def _ways(self):
        """Return how to spoil what a tier has: in all ways at the first rest, then in some."""
        return self.draw.sample(WAYS, 1 if self.has_rested else len(WAYS))

    def _spoil(self, tier, request, way):
        """Spoil what a tier has of a prompt: all of it, as far as it comes soon."""
        keys, until_s = self._all_keys(request), time.monotonic() + 0.5
        while not all(map(tier.holds, keys)) and time.monotonic() < until_s:
            self.engine.connector.poll()
            time.sleep(0.005)
        spoil(way, keys, self.memory.beginnings(request.names), *self._stores)

    def _keys(self, request):
        """Return the keys of the first group's whole chunks."""
        of_group = self.engine.connector._groups.offloaded[0].index
        return self._keys_of_groups(request)[of_group]

    def _all_keys(self, request):
        return [key for keys in self._keys_of_groups(request) for key in keys]

    def _keys_of_groups(self, request):
        groups = self.engine.connector._groups
        keys = [[] for _ in groups.all]
        groups.extend_keys(keys, request.block_hashes)
        return keys

    def _check_tiers(self):
        may_shrink = {"restart", "restart_pages", "other settings"} & {*self.faults.log}
        within_s = sums.REST_S if may_shrink else 0.0  # one that starts with less room evicts
        for root, most in self.capacities.items():
            too_full = "the disk tier is above its capacity"
            self._await(partial(sums.has_room, root, most), too_full, within_s)
        for root in self.roots:
            assert not (violations := sums.violations(root)), violations
        for root in self.encrypted:
            if not root.with_suffix(PLAIN).exists():
                assert not sums.plain_chunks(root), "an encrypted tier stores what can be read"
        for engine in self.engines:
            tiers = engine.connector._spec.io.tiers.values()
            figures = partial("\n".join, (str(tier.usage) for tier in tiers))
            self._await(partial(sums.is_within, engine), figures, within_s)
        self._await(lambda: not sums.lent_bytes(self.engine), "a loan does not end")
        self._await(lambda: not sums.spared_by_hostile(self.folder), "a store spares for no queue")
        for store in sums.open_disks():
            self._await(lambda s=store: not sums.left_in(s), lambda s=store: sums.left_in(s))
            if not self.faults.are_files_touched:
                self._await(lambda s=store: sums.is_exact(s), lambda s=store: sums.figures(s))

    def _await(self, is_so, otherwise, within_s=sums.REST_S):
        until_s = time.monotonic() + within_s
        while not is_so():
            self.engine.connector.poll()
            assert time.monotonic() < until_s, otherwise() if callable(otherwise) else otherwise
            time.sleep(0.005)

    def close(self):
        """Close in the midst of work and faults: nothing is written then, and nothing is left."""
        if self.pages is not None:
            self.pages.begin()
        self._be_struck(time.monotonic() + 0.2)
        if self.draw.random() < 0.5:
            self.faults.end()
        if self.pages is not None:
            self.pages.close()
        before = []
        for engine in self.engines:
            engine.connector.close(self.draw.choice((0.0, 3.0)))
            before.append(engine.memory.snapshot())
        self.faults.end()
        self._await_end()
        for engine, tensors in zip(self.engines, before, strict=True):
            for old, new in zip(tensors, engine.memory.snapshot(), strict=True):
                assert old.equal(new), "bytes were written after the connector was closed"

    def _await_end(self):
        until_s = time.monotonic() + sums.REST_S
        while left := sums.left_threads():
            assert time.monotonic() < until_s, f"threads are left: {left}"
            time.sleep(0.05)


def run(seed, seconds, folder, monkeypatch):
    """Run the model of a seed; a failure says all that replays and explains it."""
    install(folder, monkeypatch)
    paths = [str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # of a server of the host
    monkeypatch.setattr(io_client, "SILENT_S", 1.0)
    monkeypatch.setattr(io_server, "END_S", 0.05)  # a thread ends while calls hang
    monkeypatch.setattr(backoff, "STEADY_S", 0.0)  # each death counts as a first one
    model = Model(seed, folder)
    try:
        model.run(seconds)
    except BaseException as error:
        model.faults.heal()
        model.faults._part()
        settings = [engine.settings for engine in model.engines]
        error.add_note(f"seed {seed}: {model.kind}, {settings}")
        told = [(engine.model, dict(engine.counts)) for engine in model.engines]
        error.add_note(f"last faults: {model.faults.log[-12:]}; {told}")
        if model.pages is not None:
            error.add_note(f"pages: {model.pages.counts}, {model.pages._settings}")
            model.pages.store.close()
        error.add_note(f"again: python -m tests.support.random_model.model {seed} {seconds:g}")
        for engine in model.engines:
            engine.connector.close(0.0)
        raise
    finally:
        if model.server is not None:
            model.server.stop()
        if model.host is not None:
            model.host.kill()
        if model.manager is not None:
            model.manager.close()
    return model


def main():
    seed = int(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 6.0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        began_s = time.monotonic()
        model = run(seed, seconds, Path(folder), patched)
        took_s = time.monotonic() - began_s
    assert model.compared_while_struck, "no loaded chunk was compared while faults struck"
    pages = [model.pages] if model.pages is not None else []
    counts = sum((engine.counts for engine in [*model.engines, *pages]), Counter())
    print(f"seed {seed}: {len(model.engines)} of {model.kind}, {took_s:.1f} s, {dict(counts)}")


if __name__ == "__main__":
    faulthandler.enable()
    main()
