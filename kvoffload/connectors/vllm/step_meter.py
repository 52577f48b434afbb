"""How fast vLLM computes prompts, from what its scheduler's process sees of each step."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MIN_PROMPT_TOKENS = 64
"""A step with fewer tokens beyond one for each request tells nothing of prompts."""
MAX_STEPS = 64
"""Steps in flight; more only if vLLM never ends them."""


class _Step(NamedTuple):
    num_tokens: int
    num_prompt_tokens: int
    scheduled_s: float


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
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._ended_s = -math.inf

    def scheduled(self, num_tokens: int, num_requests: int) -> None:
        """Note that vLLM has scheduled a step, perhaps one without tokens."""
        self._steps.append(_Step(num_tokens, num_tokens - num_requests, self._clock()))

    def ended(self) -> None:
        """Note that vLLM has taken in the output of the oldest step."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock()
        if step.num_prompt_tokens >= MIN_PROMPT_TOKENS:
            self._note(step.num_tokens, now_s - max(step.scheduled_s, self._ended_s))
        self._ended_s = now_s
