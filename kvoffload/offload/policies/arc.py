"""ARC, the adaptive replacement cache (N. Megiddo, D. Modha: FAST 2003)."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from math import ceil, floor
from operator import not_

from kvoffload.offload.policies.history import Away

_List = OrderedDict[bytes, None]


def _append(recent: _List, keys: Iterable[bytes]) -> None:
    """Put keys that are not in a list at its recent end."""
    deque(map(recent.__setitem__, keys, repeat(None)), maxlen=0)


def _move(recent: _List, ghosts: _List, count: int) -> list[bytes]:
    """Take the oldest keys of a list, which become ghosts."""
    pop = recent.popitem
    keys = [pop(last=False)[0] for _ in range(count)]
    _append(ghosts, keys)
    return keys


class ARCPolicy:
    """Balances keys seen once against keys seen again, by which of the two it regrets evicting.

    The paper's T1 and T2 are ``_once`` and ``_again``, its ghost lists B1 and B2 remember the keys
    evicted from each, its p is ``_target``: how many keys seen once ought to stay. The paper
    handles a miss in one step. Here it is three calls, ``touch``, ``victims``, ``add``; made for
    one key at a time they evict exactly what the paper's step evicts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._once: _List = OrderedDict()
        self._again: _List = OrderedDict()
        self._once_ghosts: _List = OrderedDict()
        self._again_ghosts: _List = OrderedDict()
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
        self._trim()

    def add_all(self, keys: Sequence[bytes]) -> None:
        """Add keys, none of which is in the order; what is learnt and decided is as one by one."""
        once_ghosts, again_ghosts, away = self._once_ghosts, self._again_ghosts, self._away
        were_again = list(map(away.get, keys)) if away else [None] * len(keys)
        unknown = were_again.count(None)
        if not unknown:
            deque(map(away.__delitem__, keys), maxlen=0)
            _append(self._again, compress(keys, were_again))
            _append(self._once, compress(keys, map(not_, were_again)))
        elif unknown == len(keys) and all(
            ghosts.keys().isdisjoint(keys) for ghosts in (once_ghosts, again_ghosts)
        ):
            _append(self._once, keys)
        else:
            deque(map(self.add, keys), maxlen=0)
        self._again_missed = False
        self._trim()

    def _trim(self) -> None:
        """Keep the paper's bounds: a list with its ghosts ≤ capacity, all four lists ≤ twice that.

        Only adding lets them grow; an excess of ghosts may be taken after each key or after many.
        """
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        tried = len(self._once) + len(once_ghosts)
        while tried > self.capacity and once_ghosts:
            once_ghosts.popitem(last=False)
            tried -= 1
        excess = tried + len(self._again) + len(again_ghosts) - 2 * self.capacity
        while excess > 0 and again_ghosts:
            again_ghosts.popitem(last=False)
            excess -= 1

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

    def remove_all(self, keys: Sequence[bytes]) -> None:
        """Take out keys, all of which are in the order."""
        were_again = list(map(self._again.__contains__, keys))
        once = list(compress(keys, map(not_, were_again))) if True in were_again else keys
        deque(map(self._once.__delitem__, once), maxlen=0)
        if len(once) < len(keys):
            deque(map(self._again.__delitem__, compress(keys, were_again)), maxlen=0)
        self._away.keep_all(keys, were_again)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take least recently used keys from the list that is larger than it ought to be."""
        once, again = self._once, self._again
        count = min(count, len(self))
        # A key missed from ``_again`` takes from ``_once`` also when that has just its share.
        enough = ceil(self._target) if self._again_missed else floor(self._target) + 1
        beyond = max(0, min(count, len(once) - max(enough, 1) + 1))
        taken = _move(once, self._once_ghosts, beyond)
        taken += _move(again, self._again_ghosts, min(count - beyond, len(again)))
        # Where ``_again`` runs out, ``_once`` gives more than it ought to.
        return taken + _move(once, self._once_ghosts, count - len(taken))

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
