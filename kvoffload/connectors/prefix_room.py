"""Finds how much of a prefix host memory can take at once."""

from bisect import bisect_left
from collections.abc import Callable


def last_with_room(
    start: int, end: int, step: int, has_room: Callable[[int], bool | None]
) -> int | None:
    """Return the last token up to which chunks have room, all at once; ``start`` for none.

    A longer prefix is taken to need more room than a shorter one. None: it may have room soon.

    Args:
        start: the token after which a load begins.
        end: the last token to load up to.
        step: tokens; a load may end at each multiple of it, and at ``end``.
        has_room: tells whether a load up to a token has room; None: it may have room soon.
    """
    room = has_room(end)
    if room is not False:
        return end if room else None
    ends = range(start - start % step, end, step)
    too_long = bisect_left(ends, True, lo=1, key=lambda each: not has_room(each))
    return max(start, ends[too_long - 1])
