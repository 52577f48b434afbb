"""Choosing the next token: greedy, or drawn from a seed that nothing else can disturb."""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvoffload.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How a request's answer is chosen and when it ends."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    seed: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.max_tokens < 1:
            raise ConfigError("max_tokens", self.max_tokens, "must be at least 1")
        if not self.temperature >= 0:
            raise ConfigError("temperature", self.temperature, "must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError("top_k", self.top_k, "must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "must be above 0 and at most 1")


def sample(logits: Tensor, params: SamplingParams, index: int) -> int:
    """Choose the token after one row of logits ``[vocab_size]``.

    ``index`` is the token's place in the answer. The draw depends on nothing but the logits, the
    seed and this index: neither on the batch, nor on a preemption in between.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    scores, order = torch.sort(
        logits.double().cpu() / params.temperature, descending=True, stable=True
    )
    probabilities = scores.softmax(0)
    if params.top_k:
        probabilities[params.top_k :] = 0
    if params.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities[before >= params.top_p] = 0
    sums = probabilities.cumsum(0)
    drawn = torch.searchsorted(sums, _uniform(params.seed, index) * sums[-1], right=True)
    return int(order[min(int(drawn), int((probabilities > 0).sum()) - 1)])


def _uniform(seed: int, index: int) -> Tensor:
    """Return a number in [0, 1) that is a fixed function of seed and index."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return torch.tensor((int.from_bytes(digest, "big") >> 11) / 2**53, dtype=torch.float64)
