"""What vLLM's steps cost and tell: those in which nothing changes, and the speed of prompts.

What vLLM's halves would do in vain in a step without changes is left out. The speed comes from what
the scheduler's process sees of each step.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from itertools import chain, compress, count
from operator import itemgetter
from typing import Any, NamedTuple

# ---- Quiet steps ----


class DueRequests:
    """The running requests that may have chunks to store.

    vLLM's scheduler half visits each request of each step. A visit changes something only in a step
    that gives the request blocks, or that fills a chunk.

    Args:
        config: of vLLM's scheduler half.
    """

    def __init__(self, config: Any) -> None:
        first, *others = config.kv_group_configs
        self._chunk_tokens: int = first.tokens_per_chunk
        self._group_idx: int = first.group_idx
        self._prompt_only: bool = config.offload_prompt_only
        # Blocks of windows leave between two chunks, and states are handed over by other messages.
        self._visits_all = bool(
            others or first.sliding_window_size_in_chunks is not None or first.requires_cow_source
        )
        self._full_at: dict[str, int] = {}
        """For each request that may store more: the tokens that fill its next chunk."""

    def blocks_given(self, output: Any) -> Iterable[int]:
        """Return the blocks that running requests are given in a step, whether they are due or not.

        Args:
            output: vLLM's ``SchedulerOutput``.
        """
        given = filter(None, output.scheduled_cached_reqs.new_block_ids)
        return chain.from_iterable(map(itemgetter(self._group_idx), given))

    def of_step(self, output: Any, is_wanted: bool) -> Any | None:
        """Return vLLM's output of a step with the due requests alone.

        Args:
            output: vLLM's ``SchedulerOutput``.
            is_wanted: False to return None if no request is due, and none came or went.
        """
        if self._visits_all:
            return output
        running = output.scheduled_cached_reqs
        if running.resumed_req_ids:
            self.again(running.resumed_req_ids)
        places = self._due(output)
        if not (
            is_wanted
            or places
            or output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.kv_cache_block_copies
        ):
            return None
        names = [running.req_ids[i] for i in places]
        due, due.scheduled_cached_reqs = copy(output), copy(running)
        due.scheduled_cached_reqs.req_ids = names
        due.scheduled_cached_reqs.new_block_ids = [running.new_block_ids[i] for i in places]
        visited = (*(new.req_id for new in output.scheduled_new_reqs), *names)
        due.num_scheduled_tokens = {name: output.num_scheduled_tokens[name] for name in visited}
        return due

    def _due(self, output: Any) -> list[int]:
        full_at, tokens = self._full_at, output.num_scheduled_tokens
        if not full_at:
            return []
        running = output.scheduled_cached_reqs
        names, computed = running.req_ids, running.num_computed_tokens
        return [
            i
            for i in compress(count(), map(full_at.__contains__, names))
            if running.new_block_ids[i] is not None
            or computed[i] + tokens[names[i]] >= full_at[names[i]]
        ]

    def visited(self, output: Any, statuses: Mapping[str, Any]) -> None:
        """Note how far vLLM's half has come with the requests of an output.

        Args:
            output: as :meth:`of_step` returned it.
            statuses: vLLM's state of each request.
        """
        if self._visits_all:
            return
        for name in output.num_scheduled_tokens:
            status = statuses.get(name)
            if status is None:
                continue
            most = status.max_offload_tokens
            if self._prompt_only:
                prompt = status.req.num_prompt_tokens
                most = prompt if most is None else min(most, prompt)
            full_at = (status.group_states[0].next_stored_chunk_idx + 1) * self._chunk_tokens
            if most is None or full_at <= most:
                self._full_at[name] = full_at
            else:
                self._full_at.pop(name, None)
        for name in output.finished_req_ids or ():
            self._full_at.pop(name, None)

    def again(self, names: Iterable[str]) -> None:
        """Visit these requests in the next step: chunks of them are to be offered again."""
        if not self._visits_all:
            self._full_at.update(dict.fromkeys(names, 0))


def has_orders(half: Any) -> bool:
    """Whether a step without a due request has something to order all the same.

    Args:
        half: our scheduler half.
    """
    manager = half.adapter.manager
    return bool(
        half.waits_for_workers
        or half._current_batch_load_jobs
        or half._current_batch_jobs_to_flush
        or half._current_batch_allocated_block_ids
        or getattr(half, "_step_region", None) is not None  # 0.33: a lookup opened it
        or half.generations.order
        or half.operators.emptied
        or manager.has_transfers()
        or manager.waiting.needed.to_tell
        or manager.returns.to_tell
        or half.tiers.has_questions
    )


class KnownLookup(NamedTuple):
    """The answer to a waiting request, which vLLM looks up again in each step."""

    asked: Any
    """All that the answer depends on: it is valid until something of it changes."""
    answer: tuple[int | None, bool]
    until_s: float
    """Monotonic; an answer but 0 is valid for a while, because lookups and waits for room end."""


# ---- The time of steps ----

MIN_PROMPT_TOKENS = 64
"""A step with fewer tokens beyond one for each request tells nothing of prompts."""
MAX_STEPS = 64
"""Steps in flight; more only if vLLM never ends them."""


class StepMeter:
    """Measures steps that compute prompts.

    vLLM may schedule a step while an earlier one is computed; steps end in their order. So a step
    takes from its own scheduling, or from the end of the one before, until its end. The time in
    which the engine is idle counts for no step.

    Args:
        note: called with the tokens of a step and its seconds.
        clock: seconds, monotonic.
    """

    def __init__(
        self, note: Callable[[int, float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note = note
        self._clock = clock
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=MAX_STEPS)
        """Of each step in flight: its tokens, those beyond one a request, when it began."""
        self._ended_s = -math.inf

    @property
    def oldest_s(self) -> float:
        """When the oldest step in flight was scheduled; infinite without one."""
        return self._steps[0][2] if self._steps else math.inf

    def scheduled(self, num_tokens: int, num_requests: int) -> float:
        """Note that vLLM has scheduled a step, perhaps one without tokens; return the time."""
        now_s = self._clock()
        self._steps.append((num_tokens, num_tokens - num_requests, now_s))
        return now_s

    def ended(self) -> None:
        """Note that vLLM has taken in the output of the oldest step."""
        if not self._steps:
            return
        (num_tokens, num_prompt_tokens, scheduled_s), now_s = self._steps.popleft(), self._clock()
        if num_prompt_tokens >= MIN_PROMPT_TOKENS:
            self._note(num_tokens, now_s - max(scheduled_s, self._ended_s))
        self._ended_s = now_s
