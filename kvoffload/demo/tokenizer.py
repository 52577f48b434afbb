"""Text to token ids and back: every byte of UTF-8 is a token."""

from collections.abc import Sequence

EOS = 256
"""Ends a text."""
NUM_TOKENS = 257


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of token ids; other ids than bytes are left out."""
    return bytes(token for token in token_ids if token < EOS).decode(errors="replace")
