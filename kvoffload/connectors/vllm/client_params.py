"""What clients write into ``kv_transfer_params`` for vLLM, bounded before its half reads it.

vLLM's half logs a line for each wish that it does not understand, with the whole wish in it. One
request could stop the scheduler's thread for seconds and fill the log.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium

from kvoffload.offload.hints import MAX_NAMES

log = logging.getLogger(__name__)

_LIMITS = ("max_load_tokens", "max_offload_tokens")
_TIERS = "kv_load_tiers"
_KNOWN: Mapping[str, frozenset[str]] = {
    "medium": frozenset(medium.value for medium in Medium),
    "locality": frozenset(locality.value for locality in Locality),
}
_LONGEST = max(len(name) for names in _KNOWN.values() for name in names)


class ClientParams:
    """Drops wishes that vLLM's half would log; the first one of each kind is logged here.

    Args:
        ignored: called once for each wish that is dropped.
    """

    def __init__(self, ignored: Callable[[], None]) -> None:
        self._ignored = ignored
        self._logged: set[str] = set()

    def bounded(self, params: Any) -> Any:
        """Return a request's parameters, or a copy without what vLLM's half cannot read.

        Args:
            params: as the client sent them; not changed.
        """
        if not isinstance(params, Mapping):
            return params
        bad = [name for name in _LIMITS if not _is_limit(params.get(name))]
        tiers = params.get(_TIERS)
        if tiers is not None and not _are_tiers(tiers):
            bad.append(_TIERS)
        if not bad:
            return params
        self._note(bad)
        return {name: value for name, value in params.items() if name not in bad}

    def _note(self, names: Iterable[str]) -> None:
        for name in names:
            self._ignored()
            if name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "kvoffload: %s of a request is ignored: it is malformed, unknown or too long; "
                    "further ones count as hints_ignored",
                    name,
                )


def _is_limit(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _are_tiers(value: object) -> bool:
    """Whether a list names media and localities that vLLM knows, in a few objects."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_NAMES
        and all(isinstance(entry, dict) for entry in value)
        and all(
            _is_name(entry.get(field), known) for entry in value for field, known in _KNOWN.items()
        )
    )


def _is_name(value: object, known: frozenset[str]) -> bool:
    if value is None:
        return True
    return isinstance(value, str) and len(value) <= _LONGEST and value.upper() in known
