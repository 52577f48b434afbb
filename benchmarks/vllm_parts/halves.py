"""vLLM's scheduler and both halves of a connector in one process, without a model.

The scheduler is vLLM's own and makes the scheduler half. vLLM's own mix-in of the model runners
drives the worker half. In place of a forward pass each request gets a token. Runs where vLLM is
installed.
"""

import pickle
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Self

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

BLOCK, LAYERS, HEADS, HEAD = 16, 4, 2, 64
SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class Meter:
    """Seconds, or Python functions called, in hooks that are metered; one of both at a time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By side, and by side and hook."""
        self.calls: Counter[str] = Counter()
        """Functions called, by side."""
        self.functions: Counter[tuple[str, str, str]] = Counter()
        """The same by side, file and name."""
        self.is_counting = False

    def metered(self, side: str, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook of a side."""

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename != __file__:
                self.calls[side] += 1
                code = frame.f_code
                self.functions[side, code.co_filename.rpartition("/")[2], code.co_name] += 1

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_counting:
                sys.setprofile(note)
                try:
                    return _whole(hook(*args, **kwargs))
                finally:
                    sys.setprofile(None)
            started = time.perf_counter()
            try:
                return _whole(hook(*args, **kwargs))
            finally:
                took = time.perf_counter() - started
                self.seconds[side] += took
                self.seconds[f"{side} {name}"] += took

        return call

    def take(self) -> tuple[Mapping[str, float], Counter[str]]:
        """Return seconds and calls since the last call."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = defaultdict(float), Counter()
        return taken


def _whole(answer: Any) -> Any:
    # vLLM's scheduler exhausts the generator of events at once.
    return list(answer) if hasattr(answer, "send") else answer


class Halves:
    """A scheduler, a worker's KV cache, and a connector between them.

    Args:
        model: folder of a model; its configuration alone is read.
        transfer: vLLM's ``kv_transfer_config``.
        num_blocks: of the KV cache.
        max_num_seqs: requests that run at a time.
    """

    def __init__(
        self,
        model: str,
        transfer: Mapping[str, Any],
        num_blocks: int = 4096,
        max_num_seqs: int = 256,
    ) -> None:
        init_none_hash(sha256)
        self._config = _vllm_config(model, transfer, max_num_seqs)
        self._config.cache_config.num_gpu_blocks = num_blocks
        self.caches = {
            f"layer.{i}": torch.zeros(num_blocks, 2, BLOCK, HEADS, HEAD, dtype=torch.bfloat16)
            for i in range(LAYERS)
        }
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(list(self.caches), spec)]
        cache_config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        )
        self.meter = Meter()
        self.messages: list[int] = []
        """Pickled bytes of each step's message to the workers."""
        self.reports = 0
        """Steps with a report of the worker."""
        with set_current_vllm_config(self._config):
            self.scheduler = Scheduler(
                vllm_config=self._config,
                kv_cache_config=cache_config,
                log_stats=True,
                structured_output_manager=StructuredOutputManager(self._config),
                block_size=BLOCK,
            )
            self.worker = KVConnectorFactory.create_connector(
                self._config, KVConnectorRole.WORKER, cache_config
            )
            self.worker.register_kv_caches(self.caches)
        self._meter_hooks()
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._numbers = iter(range(1 << 30))

    def _meter_hooks(self) -> None:
        sides = (
            ("scheduler", self.scheduler.connector, SCHEDULER_HOOKS),
            ("worker", self.worker, WORKER_HOOKS),
        )
        for side, connector, hooks in sides:
            for name in hooks:
                setattr(connector, name, self.meter.metered(side, name, getattr(connector, name)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        """Add a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Do what a step of the engine does, but for the model; return the scheduler's output."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.messages.append(len(pickle.dumps(metadata)))
        # Runner V1 does so first, before it touches its own state.
        self.worker.handle_preemptions(metadata)
        runner = KVConnectorModelRunnerMixin
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        with (
            set_forward_context(None, self._config),
            runner.maybe_get_kv_connector_output(output) as told,
        ):
            pass
        self.reports += told.kv_connector_worker_meta is not None
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[self._sampled(name) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(output, result)
        return output

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        # None before the whole prompt is computed.
        return [7] if request.num_computed_tokens >= request.num_prompt_tokens else []

    def quiet(self, limit_s: float = 20.0) -> None:
        """Step until no transfer is in flight and nothing runs."""
        until = time.monotonic() + limit_s
        while self.scheduler.has_requests() and time.monotonic() < until:
            self.step()
            time.sleep(0.001)


def _vllm_config(model: str, transfer: Mapping[str, Any], max_num_seqs: int) -> VllmConfig:
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    return VllmConfig(
        model_config=ModelConfig(model=model, dtype="bfloat16", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
    )
