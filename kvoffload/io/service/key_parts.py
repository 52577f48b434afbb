"""Tables of keys in parts: one is listed while the rest change.

A list of a million keys takes 30 ms, and so does each look of the garbage collector at it. No
engine waits so long, because a reader lists one part after the other.
"""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_PARTS = (b"", *(bytes([first]) for first in range(256)))


def new_parts(new_part: Callable[[], T]) -> dict[bytes, T]:
    """Return a part for each first byte that a key can have: that of a key is ``key[:1]``."""
    return {first: new_part() for first in _PARTS}
