"""LRU in place of a plug-in's policy that has failed: the store must go on."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload.policies.base import Policy
from kvoffload.policies.lru import LRUPolicy

log = logging.getLogger(__name__)


class GuardedPolicy:
    """A plug-in's policy, until it raises or names a victim that may not leave.

    LRU follows each call from the start, and so knows the keys that are in the order.

    Args:
        make: makes the policy, given the capacity.
        capacity: of the store in entries.
    """

    def __init__(self, make: Callable[[int], Policy], capacity: int) -> None:
        self._lru = LRUPolicy(capacity)
        self._plugin: Policy | None = make(capacity)

    def _ask(self, verb: str, *given: Any) -> Any:
        """Call the plug-in's policy; None once it has failed."""
        if self._plugin is None:
            return None
        try:
            answer = getattr(self._plugin, verb)(*given)
            if verb == "victims":
                self._check(answer, *given)
            return answer
        except Exception as error:
            self._failed(error)
            return None

    def _check(self, named: Sequence[bytes], count: int) -> None:
        """Raise unless victims are keys in the order, each once, and some if there are any."""
        is_right = len(set(named)) == len(named) <= count and all(map(self.__contains__, named))
        if not is_right or (count and not named and len(self)):
            raise ValueError(f"victims({count}) named {len(named)} keys that may not leave")

    def _failed(self, error: Exception) -> None:
        kind, self._plugin = type(self._plugin), None
        name = f"{kind.__module__}.{kind.__qualname__}"
        log.error("kvoffload: the policy %s failed; LRU from now on", name, exc_info=error)

    def add(self, keys: Sequence[bytes]) -> None:
        self._lru.add(keys)
        self._ask("add", keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._lru.touch(keys)
        self._ask("touch", keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._lru.remove(keys)
        self._ask("remove", keys)

    def victims(self, count: int) -> Sequence[bytes]:
        named: Sequence[bytes] | None = self._ask("victims", count)
        if named is None:
            return self._lru.victims(count)
        self._lru.remove(named)
        return named

    def clear(self) -> None:
        self._lru.clear()
        self._ask("clear")

    def __len__(self) -> int:
        return len(self._lru)

    def __contains__(self, key: object) -> bool:
        return key in self._lru
