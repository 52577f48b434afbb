"""The engine: model, KV cache, scheduler and offloading put together. Start reading here.

One step: take up finished loads, choose work, compute it, choose tokens, offer full blocks for
storing. Everything runs on the caller's thread, except transfers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from kvoffload.connectors.local import LocalConnector
from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.manager import KVCacheManager
from kvoffload.demo.batch_scheduler import Scheduler
from kvoffload.demo.decoder import Model
from kvoffload.demo.engine_config import EngineConfig, parse_engine_config
from kvoffload.demo.engine_request import EngineRequest, RequestResult, Work
from kvoffload.demo.offloading import Connector, NoOffloading
from kvoffload.demo.random_weights import fingerprint, random_weights
from kvoffload.demo.runner import Runner, plan_kv_cache
from kvoffload.demo.sampling import EOS, SamplingParams, encode, sample
from kvoffload.errors import ConfigError

IDLE_WAIT_S = 0.0002
"""Pause of a step that can only wait for loads."""


class Engine:
    """Serves prompts with continuous batching. Close it, or use it in a ``with`` statement.

    Args:
        config: settings, or plain data for them.
        connect: what makes the connector from ``config.offload``; another one may wrap it.

    Raises:
        ConfigError: a setting that cannot work; names the field, the value and the remedy.
        InsufficientMemoryError: the KV cache cannot hold one request of the greatest length.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any],
        connect: Callable[..., Connector] = LocalConnector,
    ) -> None:
        if isinstance(config, Mapping):
            config = parse_engine_config(config)
        self.config = config
        device, shape = _device(config), config.model
        kv_cache_config = plan_kv_cache(config)
        state = random_weights(shape, config.seed)
        dtype, max_len = getattr(torch, config.dtype), config.max_model_len
        model = Model(shape, state, device=device, dtype=dtype, max_len=max_len)
        self.runner = Runner(model, kv_cache_config)
        self.manager = KVCacheManager(
            kv_cache_config,
            max_model_len=config.max_model_len,
            enable_caching=config.enable_prefix_caching,
        )
        self._hasher = BlockHasher(self.manager.hash_block_size)
        self.connector: Connector = NoOffloading()
        if config.offload is not None:
            self.connector = connect(
                config.offload,
                self.runner.canonical_kv_caches(),
                # Pages of two runs may be exchanged only if all of this is the same.
                facts={
                    "engine": "mini_engine",
                    "weights": fingerprint(state),
                    # What else the numbers come from: positions, windows, norms...
                    "config": msgspec.json.encode(shape, order="sorted").decode(),
                    "model": f"demo-{shape.num_layers}x{shape.hidden_size}",  # for reports alone
                    "device": device.type,
                    "dtype": config.dtype,
                    "attention": self.runner.attention_name,
                },
                block_size=self.manager.hash_block_size,
                hasher=self._hasher,
                # Windows and states: several block tables, or tables with blocks left out.
                **({} if self.manager.keeps_all_blocks else {"kv_cache_config": kv_cache_config}),
            )
        self._scheduler = Scheduler(
            self.manager,
            self.connector,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._requests: dict[str, EngineRequest] = {}
        self._ended: list[RequestResult] = []
        self._arrivals = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort unfinished requests, wait for stores in flight, and release the tiers."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.connector.close()

    @property
    def has_requests(self) -> bool:
        """Whether step() has anything left to do."""
        return self._scheduler.has_requests or bool(self._ended)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, as text or token ids; returns its id.

        Raises:
            ConfigError: the prompt is empty or too long, has unknown tokens, or the id is in use.
        """
        params = params or SamplingParams()
        tokens = encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(tokens, params)
        name = f"request-{self._arrivals}" if request_id is None else request_id
        if name in self._requests or self._scheduler.is_loading(name):
            raise ConfigError("request_id", name, "is in use by a request that has not ended")
        request = EngineRequest(name, HashChain(self._hasher, tokens), params, self._arrivals)
        self._arrivals += 1
        self._requests[name] = request
        self._scheduler.add(request)
        return name

    def abort(self, request_id: str) -> None:
        """End a request now; its result comes with the next step. Unknown ids are ignored."""
        if request_id in self._requests:
            self._finish(self._requests[request_id], "abort")

    def step(self) -> list[RequestResult]:
        """Compute one batch; returns the requests that ended with it or since the last step.

        Call it while the engine is idle, too: what was stored last goes on to the tiers.
        """
        self._scheduler.end_loads()
        work = self._scheduler.schedule()
        if work:
            self._compute(work)
        elif self._scheduler.has_requests:
            time.sleep(IDLE_WAIT_S)  # all there is waits for loads
        ended, self._ended = self._ended, []
        return ended

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestResult]:
        """Serve prompts together; returns their results in the order given."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        ids = [self.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
        results: dict[str, RequestResult] = {}
        while any(name not in results for name in ids):
            results.update((result.request_id, result) for result in self.step())
        return [results[name] for name in ids]

    def _compute(self, work: Sequence[Work]) -> None:
        block_sizes = [group.block_size for group in self.manager.groups]
        # Transfers may still read blocks that were given away: let them end before overwriting.
        self.connector.before_forward(
            block_id for item in work for block_id in item.written_blocks(block_sizes)
        )
        logits = self.runner.forward(work)
        for item in work:
            item.request.num_computed_tokens = item.end
            self.connector.after_forward(item.request, item.block_ids, item.end)
        for item, row in zip((item for item in work if item.samples), logits, strict=True):
            request = item.request
            token = sample(row, request.params, request.num_output_tokens)
            request.append_token_ids([token])
            if request.first_token_at is None:
                request.first_token_at = time.perf_counter()
            if reason := self._end_reason(request, token):
                self._finish(request, reason)

    def _end_reason(self, request: EngineRequest, token: int) -> str:
        params = request.params
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return "stop"
        at_limit = request.num_tokens >= self.config.max_model_len
        return "length" if at_limit or request.num_output_tokens >= params.max_tokens else ""

    def _finish(self, request: EngineRequest, reason: str) -> None:
        self._scheduler.finish(request, reason)
        del self._requests[request.request_id]
        self._ended.append(RequestResult.of(request))

    def _check_prompt(self, tokens: Sequence[int], params: SamplingParams) -> None:
        if not tokens:
            raise ConfigError("prompt", tokens, "must have at least one token")
        longest = self.config.max_model_len - params.max_tokens
        if len(tokens) > longest:
            raise ConfigError(
                "prompt",
                f"{len(tokens)} tokens",
                f"with max_tokens = {params.max_tokens} it may have {longest}: shorten it or raise "
                f"max_model_len = {self.config.max_model_len}",
            )
        vocab_size = self.runner.model.config.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ConfigError("prompt", "token ids", f"must be from 0 to {vocab_size - 1}")


def _device(config: EngineConfig) -> torch.device:
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError("device", config.device, "use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        remedy = f"this machine has {torch.cuda.device_count()} CUDA devices"
        raise ConfigError("device", config.device, remedy)
    return device
