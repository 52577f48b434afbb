"""ARC, the adaptive replacement cache (N. Megiddo, D. Modha: FAST 2003)."""

from collections import OrderedDict
from collections.abc import Sequence
from math import ceil, floor

from kvoffload.offload.policies.history import Away


class ARCPolicy:
    """Balances keys seen once against keys seen again, by which of the two it regrets evicting.

    The paper's T1 and T2 are ``_once`` and ``_again``, its ghost lists B1 and B2 remember the keys
    evicted from each, its p is ``_target``: how many keys seen once ought to stay. The paper
    handles a miss in one step. Here it is three calls, ``touch``, ``victims``, ``add``; made for
    one key at a time they evict exactly what the paper's step evicts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._away: Away[bool] = Away(capacity)  # notes whether the key was seen again
        self._target = 0.0
        self._again_missed = False

    def add(self, key: bytes) -> None:
        """Put a key at the recent end: of ``_again`` if it was seen before, else of ``_once``."""
        once, again = self._once, self._again
        if key in once or key in again:
            (once if key in once else again).move_to_end(key)
            return
        if self._away and key in self._away:
            (again if self._away.pop(key) else once)[key] = None
        elif key in self._once_ghosts or key in self._again_ghosts:
            self._ghost_hit(key)
            again[key] = None
        else:
            once[key] = None
        self._again_missed = False
        # The paper's bounds: a list with its ghosts ≤ capacity, all four lists ≤ twice that. Only
        # this method lets them grow, by one.
        tried = len(once) + len(self._once_ghosts)
        if tried > self.capacity and self._once_ghosts:
            self._once_ghosts.popitem(last=False)
            tried -= 1
        if tried + len(again) + len(self._again_ghosts) > 2 * self.capacity and self._again_ghosts:
            self._again_ghosts.popitem(last=False)

    def touch(self, key: bytes) -> None:
        """Count a use; for an evicted key, move the target towards the list it was missed from."""
        if key in self._again:
            self._again.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._again[key] = None
        elif key in self._away:
            self._away[key] = True
        elif self._ghost_hit(key):
            self._away.keep(key, True)

    def remove(self, key: bytes) -> None:
        """Take a key out of the order, remembering whether it was seen again."""
        if key in self._once:
            del self._once[key]
            self._away.keep(key, False)
        elif key in self._again:
            del self._again[key]
            self._away.keep(key, True)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take least recently used keys from the list that is larger than it ought to be."""
        once, again = self._once, self._again
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        # A key missed from ``_again`` takes from ``_once`` also when that has just its share.
        enough = ceil(self._target) if self._again_missed else floor(self._target) + 1
        taken: list[bytes] = []
        for _ in range(min(count, len(self))):
            if once and (len(once) >= enough or not again):
                key = once.popitem(last=False)[0]
                once_ghosts[key] = None
            else:
                key = again.popitem(last=False)[0]
                again_ghosts[key] = None
            taken.append(key)
        return taken

    def _ghost_hit(self, key: bytes) -> bool:
        """Learn from a miss of an evicted key; False if the key is unknown."""
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
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
        return len(self._once) + len(self._again)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def clear(self) -> None:
        """Forget everything, history and target included."""
        self.__init__(self.capacity)  # type: ignore[misc]
