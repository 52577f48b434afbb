"""Both connectors count uses alike: the same requests leave their policies in the same state."""

import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.outputs import KVConnectorOutput

from kvoffload.connectors.local import LocalConnector
from kvoffload.connectors.vllm.connector import HalvesSpec
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.connectors.vllm.step_messages import WorkerInfo, WorkerReport
from kvoffload.messages import TransferResult, make_offload_key
from kvoffload.policies.ordered_queue import OrderedQueue

BLOCK = 4
SLOTS = 34
SLOT_BYTES = 4096
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=2 * BLOCK
)


def group_config(i, kind):
    newer = "sliding_window_size_in_chunks" in OffloadingGroupConfig.__dataclass_fields__
    window = {"sliding_window_size_in_chunks": 2} if newer and kind is WINDOW else {}
    return OffloadingGroupConfig(BLOCK, (f"layer{i}",), i, **window)


def new_half(settings, *kinds):
    """Make the scheduler half as vLLM makes it, for these groups; it has met one worker."""
    kv_cache_config = KVCacheConfig(
        num_blocks=256,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], kind) for i, kind in enumerate(kinds)],
    )
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    config = OffloadingConfig(
        groups=tuple(group_config(i, kind) for i, kind in enumerate(kinds)),
        worker_kv_bytes_per_block=SLOT_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes": SLOTS * SLOT_BYTES},
        engine_id="e",
        model=OffloadingModelConfig("m", "float16"),
        cache=OffloadingCacheConfig(BLOCK, 1),
        parallel=parallel,
    )
    vllm_config = types.SimpleNamespace(
        cache_config=types.SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        parallel_config=types.SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        speculative_config=None,
        kv_transfer_config=types.SimpleNamespace(kv_role="kv_both"),
        use_v2_model_runner=False,
    )
    ours = read_settings(settings)
    half = KVOffloadScheduler(HalvesSpec(config, ours), ours, vllm_config, kv_cache_config)
    half.meet_workers([WorkerInfo(SLOTS, SLOT_BYTES, {"rank": 0})])
    return half


def watched(manager):
    """Record which uses and ends a manager is told of: verb, chunks, request."""
    calls = []

    def watch(verb):
        real = getattr(manager, verb)

        def note(keys, context=None):
            calls.append((verb, list(keys), context and context.req_id))
            return real(keys, context)

        setattr(manager, verb, note)

    watch("touch")
    watch("retire")
    return calls


def state_of(policy):
    """Return what a policy knows, as plain data."""
    known = {
        name: value for name, value in vars(policy).items() if name not in ("_shadows", "_chosen")
    }
    return {
        name: [queue.keys for queue in value]
        if name == "_queues"
        else value.keys
        if isinstance(value, OrderedQueue)
        else vars(value)
        if name == "_seen"
        else value
        for name, value in known.items()
    }


class Vllm:
    """Drives the scheduler half as vLLM's scheduler does, with workers that are always well."""

    def __init__(self, kinds=(FULL,), **settings):
        self.kinds = kinds
        self.half = new_half({"cpu_bytes": SLOTS * SLOT_BYTES, **settings}, *kinds)
        self.manager = self.half.adapter.manager
        self.blocks = iter(range(1, 1 << 20))

    def step(self, new=(), scheduled=None, finished=()):
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            types.SimpleNamespace(req_id=request.request_id, block_ids=tables)
            for request, tables in new
        ]
        output.num_scheduled_tokens = scheduled or {}
        running = output.scheduled_cached_reqs
        running.req_ids = list(output.num_scheduled_tokens.keys() - {r.request_id for r, _ in new})
        running.new_block_ids = [None] * len(running.req_ids)
        statuses = self.half._req_status
        running.num_computed_tokens = [
            statuses[name].req.num_computed_tokens for name in running.req_ids
        ]
        output.finished_req_ids = set(finished)
        orders = self.half.build_connector_meta(output)
        report = WorkerReport()
        for job_id in [*orders.load_jobs, *orders.store_jobs, *orders.write_through]:
            count = len(self.half._table[job_id].keys)
            report.ended.append(TransferResult(job_id, (True,) * count, True))
            if job_id >= 0:
                report.completed_jobs[job_id] = 1
        self.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))

    def new(self, prompt, in_gpu=0):
        request = types.SimpleNamespace(
            request_id=prompt.request_id,
            block_hashes=prompt.block_hashes,
            num_prompt_tokens=prompt.num_tokens,
            num_tokens=prompt.num_tokens,
            num_computed_tokens=in_gpu,
            kv_transfer_params=None,
            kv_hints=None,
            cache_salt=None,
            mm_features=[],
            lora_request=None,
            skip_reading_prefix_cache=False,
            status=None,
            is_finished=lambda: request.over,
            over=False,
        )
        self.half.on_new_request(request)
        return request

    def give_up(self, prompt):
        """End a request that was looked up, and never admitted."""
        request = self.new(prompt)
        found, _ = self.half.get_num_new_matched_tokens(request, 0)
        self.end(request)
        return found

    def end(self, request):
        request.over = True
        self.half.request_finished(request)
        self.step(finished=[request.request_id])

    def run(self, prompt, in_gpu=0, steps=1):
        half, request = self.half, self.new(prompt, in_gpu)
        found, _ = half.get_num_new_matched_tokens(request, in_gpu)
        count = -(-prompt.num_tokens // BLOCK)
        tables = tuple([next(self.blocks) for _ in range(count)] for _ in self.kinds)
        if found:
            first = [
                (0, in_gpu + found - WINDOW.sliding_window)[kind is WINDOW] for kind in self.kinds
            ]
            blocks = tuple(
                [
                    types.SimpleNamespace(
                        block_id=block,
                        is_null=i * BLOCK < first_token,
                        block_hash=b"" if i * BLOCK < in_gpu else None,
                    )
                    for i, block in enumerate(table)
                ]
                for table, first_token in zip(tables, first, strict=True)
            )
            half.update_state_after_alloc(request, types.SimpleNamespace(blocks=blocks), found)
            self.step()  # the load; the request waits for it
            request.num_computed_tokens += found
        new = [(request, tables)]
        for end in ends(request.num_computed_tokens, prompt.num_tokens, steps):
            self.step(new, {request.request_id: end - request.num_computed_tokens})
            new, request.num_computed_tokens = (), end
        self.end(request)
        return found

    def close(self):
        self.half.shutdown()


class Local:
    """Drives the connector for one process."""

    def __init__(self, kv_caches, **settings):
        config = {"cpu_bytes": SLOTS * SLOT_BYTES, "blocks_per_chunk": 1, **settings}
        self.connector = LocalConnector(config, kv_caches, block_size=BLOCK, facts={"model": "m"})
        self.manager = self.connector._manager

    def run(self, prompt, in_gpu=0, steps=1):
        connector = self.connector
        found = connector.get_num_new_matched_tokens(prompt, in_gpu)
        table = [range(1, 1 + -(-prompt.num_tokens // BLOCK))]
        if found:
            connector.update_state_after_alloc(prompt, table, found)
            connector.flush()
            connector.poll()
        for end in ends(in_gpu + found, prompt.num_tokens, steps):
            connector.after_forward(prompt, table, end)
            connector.flush()
        connector.request_finished(prompt)
        return found

    def give_up(self, prompt):
        """End a request that was looked up, and never admitted."""
        found = self.connector.get_num_new_matched_tokens(prompt, 0)
        self.connector.request_finished(prompt)
        return found

    def close(self):
        self.connector.close()


def ends(computed, num_tokens, steps):
    """After how many tokens each step of a prefill ends."""
    size = -(-(num_tokens - computed) // steps)
    return [min(num_tokens, computed + (i + 1) * size) for i in range(steps)]


@pytest.fixture
def both(new_kv_caches, closing):
    def make(**settings):
        return closing(Local(new_kv_caches(), **settings)), closing(Vllm(**settings))

    return make


@pytest.mark.parametrize("policy", ["lru", "arc", "handicap"])
def test_both_connectors_tell_the_manager_the_same(both, new_request, policy):
    told, found, states = [], [], []
    requests = [
        ("a", 0, 1),
        ("b", 0, 3),
        ("a", 0, 1),
        ("c", 8, 1),
        ("b", 12, 2),
        ("d", 0, 1),
        ("e", 0, 2),
        ("b", 0, 1),
    ]
    for engine in both(policy=policy):
        told.append(watched(engine.manager))
        found.append(
            [
                engine.run(new_request(name, 41, request_id=f"r{i}"), in_gpu, steps)
                for i, (name, in_gpu, steps) in enumerate(requests)
            ]
        )
        states.append(state_of(engine.manager._host.order.normal))
    assert found == [[0, 0, 40, 0, 28, 0, 0, 40]] * 2
    assert told[0] == told[1]
    assert [verb for verb, *_ in told[0]] == ["touch", "retire"] * len(requests)
    assert states[0] == states[1]


def test_chunks_of_windows_count_where_a_request_loads_them(new_request):
    engine = Vllm([FULL, WINDOW])
    calls = watched(engine.manager)
    prompt = new_request("p", 41)
    full, window = (
        [make_offload_key(hashed, group) for hashed in prompt.block_hashes] for group in (0, 1)
    )
    engine.run(prompt)
    assert engine.run(new_request("p", 41, request_id="again")) == 40
    engine.close()
    first, last, second, _ = [keys for _, keys, _ in calls]
    assert first == full
    assert second == [*full[:8], full[8], window[8], full[9], window[9]]
    assert [key for key in last if key in full] == full
    assert last[-2:] == [full[9], window[9]]


def test_prompts_seen_once_count_as_seen_once(both, new_request):
    for engine in both(policy="arc"):
        for i in range(3):
            engine.run(new_request(f"p{i}", 20))
        policy = engine.manager._host.order.normal
        assert (len(policy._once.keys), len(policy._again.keys)) == (15, 0)


def test_a_threshold_of_three_takes_three_requests(both, new_request):
    for engine in both(store_threshold=3):
        resident = []
        for i in range(3):
            engine.run(new_request("p", 20, request_id=f"r{i}"), steps=2)
            resident.append(engine.manager.resident)
        assert resident == [0, 0, 5]


def test_requests_that_were_never_admitted_change_no_order(both, new_request):
    for engine in both(policy="lru"):
        engine.run(new_request("a", 41))
        engine.run(new_request("b", 41))
        order = engine.manager._host.evictable  # for LRU, in the policy's order
        before = list(order)
        assert engine.give_up(new_request("a", 41, request_id="again")) == 40
        assert list(order) == before
