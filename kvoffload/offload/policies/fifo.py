"""First in, first out: the yardstick that ignores every use."""

from collections.abc import Sequence

from kvoffload.offload.policies.lru import LRUPolicy


class FIFOPolicy(LRUPolicy):
    """The key added longest ago leaves first; a pinned key starts anew when it is released."""

    def touch(self, key: bytes) -> None:
        """Uses do not count."""

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the ``count`` keys added longest ago."""
        return super().victims(count)
