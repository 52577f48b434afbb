"""ARC, the adaptive replacement cache (N. Megiddo, D. Modha: FAST 2003)."""

from collections import deque
from collections.abc import Sequence
from itertools import compress
from math import ceil, floor
from operator import not_

from kvoffload.policies.history import PinnedState
from kvoffload.policies.ordered_queue import OrderedQueue


class ARCPolicy:
    """Balances keys seen once against keys seen again, by which of the two it regrets evicting.

    The paper's T1 and T2 are ``_once`` and ``_again``, its ghost lists B1 and B2 remember the keys
    evicted from each, its p is ``_target``: how many keys seen once ought to stay. The paper
    handles a miss in one step. Here it is three calls, ``touch``, ``victims``, ``add``; made for
    one key at a time they evict exactly what the paper's step evicts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._once, self._again = OrderedQueue(capacity), OrderedQueue(capacity)
        self._once_ghosts, self._again_ghosts = OrderedQueue(capacity), OrderedQueue(capacity)
        self._away: PinnedState[bool] = PinnedState(capacity)  # True: seen again
        self._target = 0.0
        self._again_missed = False

    def add(self, key: bytes) -> None:
        """Put a key at the recent end: of ``_again`` if it was seen before, else of ``_once``."""
        if key in self:
            held = self._once if key in self._once.keys else self._again
            del held.keys[key]
            held.keys[key] = held.stamp
            return
        if self._away and key in self._away:
            queue = self._again if self._away.pop(key) else self._once
        elif self._ghost_hit(key):
            queue = self._again
        else:
            queue = self._once
        queue.keys[key] = queue.stamp
        self._again_missed = False
        self._trim()

    def add_all(self, keys: Sequence[bytes]) -> None:
        """Add keys, none of which is in the order; what is learnt and decided is as one by one."""
        away = self._away
        were_again = list(map(away.get, keys)) if away else [None] * len(keys)
        unknown = were_again.count(None)
        if not unknown:
            deque(map(away.__delitem__, keys), maxlen=0)
            self._again.put(compress(keys, were_again))
            self._once.put(compress(keys, map(not_, were_again)))
        elif unknown == len(keys) and all(
            ghosts.keys.keys().isdisjoint(keys)
            for ghosts in (self._once_ghosts, self._again_ghosts)
        ):
            self._once.put(keys)
        else:
            deque(map(self.add, keys), maxlen=0)
        self._again_missed = False
        self._trim()

    def _trim(self) -> None:
        """Keep the paper's bounds: a list with its ghosts ≤ capacity, all four lists ≤ twice that.

        Only adding lets them grow; an excess of ghosts may be taken after each key or after many.
        """
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        tried = len(self._once.keys) + len(once_ghosts.keys)
        if tried > self.capacity and once_ghosts.keys:
            tried -= len(once_ghosts.pop(tried - self.capacity))
        excess = tried + len(self._again.keys) + len(again_ghosts.keys) - 2 * self.capacity
        if excess > 0 and again_ghosts.keys:
            again_ghosts.pop(excess)

    def touch(self, key: bytes) -> None:
        """Count a use; for an evicted key, move the target towards the list it was missed from."""
        again = self._again
        if key in again.keys:
            del again.keys[key]
            again.keys[key] = again.stamp
        elif key in self._once.keys:
            del self._once.keys[key]
            again.keys[key] = again.stamp
        elif key in self._away:
            self._away[key] = True
        elif self._ghost_hit(key):
            self._away.keep(key, True)

    def remove(self, key: bytes) -> None:
        """Take a key out of the order, remembering whether it was seen again."""
        if key in self._once.keys:
            del self._once.keys[key]
            self._away.keep(key, False)
        elif key in self._again.keys:
            del self._again.keys[key]
            self._away.keep(key, True)

    def remove_all(self, keys: Sequence[bytes]) -> None:
        """Take out keys, all of which are in the order."""
        once, again = self._once.keys, self._again.keys
        were_again = list(map(again.__contains__, keys))
        if True in were_again:
            deque(map(again.__delitem__, compress(keys, were_again)), maxlen=0)
            deque(map(once.__delitem__, compress(keys, map(not_, were_again))), maxlen=0)
        else:
            deque(map(once.__delitem__, keys), maxlen=0)
        self._away.keep_all(keys, were_again)

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

    def clear(self) -> None:
        """Forget everything, history and target included."""
        self.__init__(self.capacity)  # type: ignore[misc]
