"""First in, first out: the yardstick that ignores every use."""

from kvoffload.policies.lru import LRUPolicy


class FIFOPolicy(LRUPolicy):
    """The key added longest ago leaves first; a pinned key starts anew when it is released."""

    def touch(self, key: bytes) -> None:
        """Uses do not count."""
