"""Answers of transfers, which have one verdict a chunk; the manager wants good and bad apart."""

from collections.abc import Sequence

from kvoffload.offload.base import OffloadKey


def split(
    keys: Sequence[OffloadKey], ok: Sequence[bool]
) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
    """Return the chunks that were moved well, and those that were not.

    Mostly all were: then the chunks are returned as they are, which the manager ends as a whole.
    """
    if all(ok) and len(ok) == len(keys):
        return keys, ()
    good = [key for key, fine in zip(keys, ok, strict=True) if fine]
    return good, [key for key, fine in zip(keys, ok, strict=True) if not fine]
