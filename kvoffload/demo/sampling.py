"""Tokens: of a text its bytes; the next one greedy, or drawn from a seed of the request's own."""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvoffload.errors import check_setting

EOS = 256
"""The token that ends a text; those below it are bytes."""


def encode(text: str) -> list[int]:
    """Return the token ids of a text: its bytes in UTF-8."""
    return list(text.encode())


@dataclass(frozen=True)
class SamplingParams:
    """How a request's answer is chosen and when it ends."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0 takes the likeliest token."""
    seed: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_setting(self, "max_tokens", self.max_tokens >= 1, "must be at least 1")
        check_setting(self, "temperature", self.temperature >= 0, "must be 0 (greedy) or more")


def sample(logits: Tensor, params: SamplingParams, index: int) -> int:
    """Choose the token after one row of logits ``[vocab_size]``.

    ``index`` is the token's place in the answer. The draw depends on nothing but the logits, the
    seed and this index: neither on the batch, nor on a preemption in between.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    sums = (logits.double().cpu() / params.temperature).softmax(0).cumsum(0)
    drawn = torch.searchsorted(sums, _uniform(params.seed, index) * sums[-1], right=True)
    return min(int(drawn), len(sums) - 1)


def _uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that is a fixed function of seed and index."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
