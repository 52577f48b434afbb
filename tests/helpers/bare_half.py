"""A scheduler half without vLLM's part of it, which wants a whole configuration."""

import types
from collections import deque

from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.vllm.client_requests import ClientParams, ExplainedRequests
from kvoffload.connectors.vllm.engine_weights import Generations
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter
from kvoffload.connectors.vllm.operators import Operators
from kvoffload.connectors.vllm.quiet_steps import DueRequests, StepMeter
from kvoffload.connectors.vllm.rank_tiers import RankTiers
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.connectors.vllm.start import read_settings

GROUP = types.SimpleNamespace(
    group_idx=0, tokens_per_chunk=16, sliding_window_size_in_chunks=None, requires_cow_source=False
)
CONFIG = types.SimpleNamespace(
    kv_group_configs=(GROUP,),
    blocks_per_chunk=1,
    offload_prompt_only=True,
    num_workers=1,
    model_config=types.SimpleNamespace(multimodal_config=None),
)


def bare_half(**settings):
    """Make a half that has met no worker."""
    half = object.__new__(KVOffloadScheduler)
    half.adapter, half.settings = ManagerAdapter(), read_settings(settings)
    half.config, half._meter = CONFIG, StepMeter(half.adapter.computed)
    half.generations, half.waits_for_workers = Generations(half), True
    half.tiers = RankTiers(half.settings, (), ())
    half._table = JobTable(half.adapter.manager)
    half._awaits_reports, half._spans, half._vllm_config = False, None, CONFIG
    half._explained = ExplainedRequests(half.adapter.explain)
    half.operators = Operators(half, CONFIG)
    half._params = ClientParams(half.adapter.count)
    half._due, half._req_status, half._block_id_to_pending_jobs = DueRequests(CONFIG), {}, {}
    half._current_batch_load_jobs, half._current_batch_jobs_to_flush = {}, set()
    half._current_batch_allocated_block_ids = set()
    half._chunks_being_loaded, half.aborted = set(), deque()
    return half
