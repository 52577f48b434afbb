"""A small engine over a connector, whose tiers run in an I/O process that tests mistreat.

Each prompt has bytes of its own, which each load is compared with. Host memory keeps no chunk, so
every hit is one of a tier.
"""

import time
from operator import le
from types import SimpleNamespace

import psutil
import torch

from kvoffload.connectors.local import LocalConnector
from tests.support.manager_check import check

BLOCK = 4
PROMPT = 81
TOKENS = 80
SLOT = 4096
STORED, LOADED = list(range(5, 25)), list(range(30, 51))


class SmallEngine:
    """Stores and loads prompts of ten chunks each, and checks each answer.

    Args:
        kv_caches: of 64 blocks.
        new_request: makes a request of a name.
        backends: settings of the tiers.
        model: an engine of another one does not find its chunks.
    """

    def __init__(
        self, kv_caches, new_request, *backends, slots=12, io="process", model="m", **settings
    ):
        config = {
            "cpu_bytes": 0,
            "staging_bytes": slots * SLOT,
            "blocks_per_chunk": 2,
            "backends": backends,
            "io": io,
            "lookup_timeout_s": 15.0,
            "load_timeout_s": 30.0,
            "store_timeout_s": 30.0,
            **settings,
        }
        self.connector = LocalConnector(config, kv_caches, block_size=BLOCK, facts={"model": model})
        self.caches = kv_caches
        self.truth = {}
        self._new_request = new_request
        self._loads = 0

    @property
    def client(self):
        return self.connector._spec.io

    @property
    def pid(self):
        return self.client._peer.pid

    @property
    def died(self):
        return self.client.died

    def wait_at_most(self, timeout_s):
        """Let loads and stores take so long from now on."""
        self.client._load_timeout_s = self.client._store_timeout_s = timeout_s

    def store(self, name):
        """Compute a prompt; return when all writes have ended, well or not."""
        kept = self.truth.get(name)
        for t, old in zip(self.caches.tensors, kept or self.caches.tensors, strict=True):
            shape = t.tensor[STORED].shape
            t.tensor[STORED] = old if kept else torch.randint(-128, 127, shape, dtype=torch.int8)
        self.truth[name] = [t.tensor[STORED].clone() for t in self.caches.tensors]
        request = self._new_request(name, PROMPT)
        end_s = time.monotonic() + 120
        while True:
            self.connector.after_forward(request, [STORED], PROMPT)
            assert self.connector.flush(120), "a store hangs"
            if not self.connector._requests.find(request).refused:
                break
            assert time.monotonic() < end_s, "no slot becomes free"
        self.connector.request_finished(request)

    def load(self, name):
        """Load what is promised of a prompt; return how many chunks came, all of them right."""
        self._loads += 1
        for t in self.caches.tensors:
            t.tensor[LOADED] = 0
        request = self._new_request(name, PROMPT, request_id=f"{name} {self._loads}")
        end_s = time.monotonic() + 120
        while (tokens := self.connector.get_num_new_matched_tokens(request, 0)) is None:
            assert time.monotonic() < end_s, "a lookup hangs"
            time.sleep(0.001)
        if not tokens:
            self.connector.poll()
        else:
            self.connector.update_state_after_alloc(request, [LOADED], tokens)
            while not (outcomes := self.connector.poll()):
                assert time.monotonic() < end_s, "a load hangs"
                time.sleep(0.0005)
            tokens = outcomes[0].num_loaded_tokens
        self.connector.request_finished(request)
        self._compare(name, tokens // BLOCK)
        return tokens // BLOCK // 2

    def _compare(self, name, num_blocks):
        if not num_blocks:
            return
        for t, truth in zip(self.caches.tensors, self.truth[name], strict=True):
            assert torch.equal(t.tensor[LOADED[:num_blocks]], truth[:num_blocks]), "wrong bytes"

    def forget(self):
        """Take in that nothing stored so far can be loaded."""
        self.truth.clear()

    def await_hits(self, name, limit_s=120.0):
        """Try until the whole prompt comes from a tier; return the time of that moment."""
        end_s = time.monotonic() + limit_s
        while self.load(name) < 10:
            assert time.monotonic() < end_s, f"no hits after {limit_s} s"
            time.sleep(0.002)
        return time.monotonic()

    def check(self):
        """Nothing is in flight, no slot is lost, and the manager is right."""
        end_s = time.monotonic() + 60
        while self.connector.stats()["host_chunks_busy"]:
            self.connector.poll()
            assert time.monotonic() < end_s, "slots are lost"
            time.sleep(0.001)
        assert self.connector.flush(60)
        check(self.connector)

    def held(self):
        """Descriptors and threads of this process, and its children."""
        me = psutil.Process()
        children = {child.pid for child in me.children()}
        return SimpleNamespace(fds=me.num_fds(), threads=me.num_threads(), children=children)

    def check_held(self, before):
        """No more is held than before, once ended threads and processes are gone."""
        end_s = time.monotonic() + 60
        while True:
            now = self.held()
            left = (now.fds, now.threads, len(now.children))
            if all(map(le, left, (before.fds, before.threads, len(before.children)))):
                return
            assert time.monotonic() < end_s, f"before: {before}, now: {now}"
            time.sleep(0.01)
