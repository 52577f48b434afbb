"""What operators ask a running vLLM: how much of a prompt is where, and to empty its tiers.

Orders are carried out on the thread of vLLM's scheduler, between two of its steps.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvoffload.connectors.cache_lookup import KeyedGroup, look_up
from kvoffload.connectors.control_server import Operated, Refused
from kvoffload.connectors.tier_io import tier_names
from kvoffload.connectors.vllm.engine_weights import our_connectors
from kvoffload.connectors.vllm.start import hook
from kvoffload.control import HOST, EngineFacts, Found

BLOCKS_AT_ONCE = 32
"""Blocks that are hashed before the thread of a step may go on."""
NEXT_BLOCKS_S = 0.0005


class Operators(Operated):
    """Carries out operators' orders.

    Args:
        half: our scheduler half.
        vllm_config: vLLM's.
    """

    def __init__(self, half: Any, vllm_config: Any) -> None:
        super().__init__()
        self._half = half
        self._vllm_config = vllm_config
        self.emptied: tuple[str, str] | None = None
        """The workers' order to empty stores: its name and a tier, as their message has it."""
        self._answers: dict[int, str] = {}
        """Rank → what is wrong with the stores that it was to empty last, "" for nothing."""
        self._name = ""

    def take_emptied(self) -> tuple[str, str] | None:
        """Return what the workers are to empty with this step."""
        taken, self.emptied = self.emptied, None
        return taken

    def take_answers(self, answers: Mapping[int, tuple[str, str]]) -> None:
        """Take in that workers have emptied stores, unless another order came since."""
        self._answers |= {
            rank: wrong for rank, (name, wrong) in answers.items() if name == self._name
        }

    # ---- on the server's thread ----

    def facts(self) -> EngineFacts:
        model, settings = self._vllm_config.model_config, self._half.settings
        host = [HOST] if settings.cpu_bytes else []
        names = [name for name, _ in tier_names(settings)]
        return EngineFacts(os.getpid(), model.model, model.tokenizer, [*host, *names])

    def lookup(self, token_ids: list[int], salt: str) -> Iterator[Found | None]:
        most = self._vllm_config.model_config.max_model_len
        if len(token_ids) > most:
            raise Refused(f"a prompt of {len(token_ids)} tokens; the engine takes {most}")
        hashes = self._block_hashes(token_ids, salt)
        groups = []
        for group in self._half.config.kv_group_configs:
            every = group.hashes_per_chunk
            keys = [make_offload_key(each, group.group_idx) for each in hashes[every - 1 :: every]]
            reads_all = group.sliding_window_size_in_chunks is None
            groups.append(KeyedGroup(keys, group.tokens_per_chunk, reads_all))
        return self._look_up(len(token_ids), groups)

    def _block_hashes(self, token_ids: list[int], salt: str) -> list[bytes]:
        """Hash a prompt as vLLM does, with pauses for the thread that steps."""
        if not token_ids:
            return []
        digest = get_hash_fn_by_name(self._vllm_config.cache_config.prefix_caching_hash_algo)
        numbers = count(1)

        def patient(value: Any) -> bytes:
            if not next(numbers) % BLOCKS_AT_ONCE:
                time.sleep(NEXT_BLOCKS_S)
            hashed: bytes = digest(value)
            return hashed

        hasher = get_request_block_hasher(self._half.config.tokens_per_hash, patient)
        request = Request(
            "kvoffload-lookup",
            token_ids,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt or None,
            block_hasher=hasher,
        )
        return list(request.block_hashes)

    # ---- on the scheduler's thread ----

    def _look_up(self, num_tokens: int, groups: list[KeyedGroup]) -> Iterator[Found | None]:
        half = self._half
        while half.waits_for_workers:
            yield None  # the workers have yet to say what they have
        has_host = bool(half.settings.cpu_bytes)
        yield from look_up(num_tokens, groups, half.adapter.manager, has_host=has_host)

    def clear(self, tier: str) -> Iterator[str | None]:
        half = self._half
        while half.waits_for_workers or half.generations.order is not None:
            yield None
        if tier in ("", HOST):
            half.empty_host_memory()
        if tier != HOST and half.tiers.tiers:
            half._table.mark_stale()
            self._name, self._answers = uuid.uuid4().hex, {}
            half.renew_tiers(self._name)
            half.adapter.changes += 1
            self.emptied = self._name, tier
            while len(self._answers) < half.config.num_workers:
                yield None
            yield "; ".join(sorted(set(filter(None, self._answers.values()))))
        yield ""


def wake_for_operators() -> None:
    """Let an operator's order wake an idle engine that has a process of its own. Idempotent."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for kind in (EngineCoreProc, DPEngineCoreProc):
        hook(kind, "run_busy_loop", _around_loop)


def _around_loop(loop: Callable[[Any], None], core: Any) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    def wake() -> None:
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    for connector in our_connectors(core.scheduler):
        connector.scheduler.operators.orders.wake = wake
    loop(core)
