"""ARC, the adaptive replacement cache (N. Megiddo, D. Modha: FAST 2003)."""

from collections.abc import Sequence
from itertools import compress
from math import ceil, floor
from operator import not_

from kvoffload.policies.history import PinnedState
from kvoffload.policies.ordered_queue import OrderedQueue, compact


class ARCPolicy:
    """Balances keys seen once against keys seen again, by which of the two it misses more.

    The paper's T1 and T2 are ``_once`` and ``_again``. Its ghost lists B1 and B2 remember the keys
    evicted from each. Its p is ``_target``: how many keys seen once ought to stay. The paper
    handles a miss in one step. Here a miss is three calls, ``touch``, ``victims``, ``add``; made
    for one key at a time they evict exactly what the paper's step evicts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        capacity = self.capacity
        self._once, self._again = OrderedQueue(capacity), OrderedQueue(capacity)
        self._once_ghosts, self._again_ghosts = OrderedQueue(capacity), OrderedQueue(capacity)
        self._pinned: PinnedState[bool] = PinnedState(capacity)  # True: seen again
        self._target = 0.0
        self._again_missed = False

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the recent end: of ``_again`` if they were seen before, else of ``_once``."""
        if len(keys) < 2 or not self._add_alike(keys):
            for key in keys:
                self._add_one(key)

    def _add_alike(self, keys: Sequence[bytes]) -> bool:
        """Add keys at once if all were pinned, or if none was and none is a ghost."""
        pinned = self._pinned
        were_again = list(map(pinned.get, keys)) if pinned else [None] * len(keys)
        unknown = were_again.count(None)
        if not unknown:
            pinned.drop(keys)
            self._again.put(compress(keys, were_again))
            self._once.put(compress(keys, map(not_, were_again)))
        elif unknown == len(keys) and all(
            ghosts.keys.keys().isdisjoint(keys)
            for ghosts in (self._once_ghosts, self._again_ghosts)
        ):
            self._once.put(keys)
        else:
            return False
        self._again_missed = False
        self._trim()
        return True

    def _add_one(self, key: bytes) -> None:
        if self._pinned and key in self._pinned:
            queue = self._again if self._pinned.pop(key) else self._once
        else:
            queue = self._again if self._ghost_hit(key) else self._once
        queue.keys[key] = 0
        self._again_missed = False
        self._trim()

    def _trim(self) -> None:
        """Keep the paper's bounds: a list with its ghosts ≤ capacity, all four lists ≤ twice that.

        Only adding lets them grow. Ghosts in excess may leave after each key or after many.
        """
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        tried = len(self._once.keys) + len(once_ghosts.keys)
        if tried > self.capacity and once_ghosts.keys:
            tried -= len(once_ghosts.pop(tried - self.capacity))
        excess = tried + len(self._again.keys) + len(again_ghosts.keys) - 2 * self.capacity
        if excess > 0 and again_ghosts.keys:
            again_ghosts.pop(excess)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count uses; for an evicted key, move the target towards the list it was evicted from."""
        once, again, pinned = self._once.keys, self._again.keys, self._pinned
        for key in keys:
            if key in again:
                del again[key]
                again[key] = 0
            elif key in once:
                del once[key]
                again[key] = 0
            elif key in pinned:
                pinned[key] = True
            elif self._ghost_hit(key):
                pinned.keep((key,), (True,))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order and remember whether they were seen again."""
        were_again = list(map(self._again.keys.__contains__, keys))
        if False not in were_again:
            self._again.discard(keys)
        else:
            self._again.discard(compress(keys, were_again))
            self._once.discard(compress(keys, map(not_, were_again)))
        if len(keys) > 1:  # each prompt has chunks of both
            compact(self._again.keys)
            compact(self._once.keys)
        self._pinned.keep(keys, were_again)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take least recently used keys from the list that is larger than it ought to be."""
        count = min(count, len(self))
        # A key missed from ``_again`` takes from ``_once`` also when that has just its share.
        enough = ceil(self._target) if self._again_missed else floor(self._target) + 1
        beyond = max(0, min(count, len(self._once.keys) - max(enough, 1) + 1))
        taken = self._evict(self._once, self._once_ghosts, beyond)
        if len(taken) < count:
            taken += self._evict(self._again, self._again_ghosts, count - len(taken))
        if len(taken) < count:  # ``_again`` ran out: ``_once`` gives more than it ought to
            taken += self._evict(self._once, self._once_ghosts, count - len(taken))
        return taken

    @staticmethod
    def _evict(queue: OrderedQueue, ghosts: OrderedQueue, count: int) -> list[bytes]:
        """Take the oldest keys of a list, which become ghosts."""
        keys = queue.pop(count)
        ghosts.put(keys)
        return keys

    def _ghost_hit(self, key: bytes) -> bool:
        """Learn from a miss of an evicted key; False if the key is unknown."""
        once_ghosts, again_ghosts = self._once_ghosts.keys, self._again_ghosts.keys
        if key in once_ghosts:
            step = max(1.0, len(again_ghosts) / len(once_ghosts))
            self._target = min(float(self.capacity), self._target + step)
            del once_ghosts[key]
            self._again_missed = False
            return True
        if key in again_ghosts:
            step = max(1.0, len(once_ghosts) / len(again_ghosts))
            self._target = max(0.0, self._target - step)
            del again_ghosts[key]
            self._again_missed = True
            return True
        return False

    def __len__(self) -> int:
        return len(self._once.keys) + len(self._again.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._once.keys or key in self._again.keys
