"""First in, first out: a reference that ignores every use."""

from collections.abc import Sequence

from kvoffload.policies.lru import LRUPolicy


class FIFOPolicy(LRUPolicy):
    """The key added longest ago leaves first; a released pin adds the key again."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Ignore the use."""
