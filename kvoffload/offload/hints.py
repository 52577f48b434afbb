"""What a request may ask of offloading, in its ``kv_transfer_params`` under ``"kvoffload"``.

For instance ``{"kvoffload": {"max_load_tokens": 4096}}``. Clients write hints, so a hint is a wish.
A hint that is unknown, malformed, or not allowed by the operator is ignored and counted. Only the
parsed form is kept, which has a few small fields.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from sys import float_info
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvoffload.config import HARMLESS_HINTS
from kvoffload.offload.base import ReqContext

log = logging.getLogger(__name__)

PARAM = "kvoffload"
REMEMBERED_REQUESTS = 1024
MAX_NAMES = 16
"""Hints, or tiers of one hint, above which a request's hints are ignored unread."""
MAX_NAME_CHARS = 40
MAX_SESSION_CHARS = 256
RETURN_CLASSES_S = {"soon": 10.0, "minutes": 120.0, "hours": 3600.0, "never": inf}
"""What a class of returns means: a typical time of it."""
WARNING_INTERVAL_S = 60.0


class Hints(msgspec.Struct, frozen=True):
    """The wishes of one request; the defaults are what a request gets that has none."""

    offload: bool = True
    """False: none of its chunks are stored."""
    tiers: Annotated[tuple[str, ...], Meta(max_length=MAX_NAMES)] | None = None
    """Only these tiers are read and written below host memory; None for all, () for none."""
    max_load_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Tokens to load at most; the connector obeys it."""
    priority: int = 0
    """Of the chunks it stores: those below 0 leave host memory first, those above 0 last."""
    explain: bool = False
    """True: say with its output where each chunk of its prompt was found, or why it was not."""
    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] | None = None
    """The session of the request, which has one claim at a time; see ``returns_in_s``."""
    returns_in_s: Annotated[float, Meta(ge=0, le=float_info.max)] | None = None
    """How many seconds after this request's end its session needs these chunks again."""
    returns: Literal["soon", "minutes", "hours", "never"] | None = None
    """The same as a class; ``returns_in_s`` goes before it."""
    load_tiers: tuple[str, ...] | None = None
    """Those of ``tiers`` that are read for it; from :attr:`ReqContext.reads_tier`."""

    @property
    def returns_s(self) -> float | None:
        """In how many seconds the session returns: infinite for never, None if it is not said."""
        if self.returns_in_s is not None or self.returns is None:
            return self.returns_in_s
        return RETURN_CLASSES_S[self.returns]


NO_HINTS = Hints()
_FIELDS = {
    field.encode_name: field
    for field in msgspec.structs.fields(Hints)
    if field.name != "load_tiers"
}


class HintReader:
    """Parses the hints of each request once; counts and reports what it ignores.

    Args:
        counters: where ``hints_ignored`` and ``hints_not_allowed`` are counted.
        allowed: the names of the hints that requests may use.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        counters: Counter[str],
        allowed: Iterable[str] = HARMLESS_HINTS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._allowed = frozenset(allowed)
        self._now_s = now_s
        self.known: OrderedDict[str, Hints] = OrderedDict()
        """What the latest requests with hints asked for, by request; their later calls may name the
        request alone."""
        self._quiet_until_s = float("-inf")

    def hints(self, context: ReqContext, tier_names: frozenset[str]) -> Hints:
        """Return what a request asks for; ``tier_names`` are those that exist."""
        known = self.known.get(context.req_id)
        if known is not None or not (context.kv_transfer_params or context.reads_tier):
            return known or NO_HINTS
        hints = self._parse(context.kv_transfer_params or {}, tier_names)
        read = hints.tiers
        if context.reads_tier is not None:
            read = tuple(filter(context.reads_tier, tier_names if read is None else read))
        hints = msgspec.structs.replace(hints, load_tiers=read)
        if context.req_id:
            self.known[context.req_id] = hints
            if len(self.known) > REMEMBERED_REQUESTS:
                self.known.popitem(last=False)
        return hints

    def forget(self, req_id: str) -> None:
        """Drop the hints of a request that ended; its id may name another request now."""
        self.known.pop(req_id, None)

    def _parse(self, params: object, tier_names: frozenset[str]) -> Hints:
        if not isinstance(params, Mapping):
            return self._ignore("kv_transfer_params", "must be an object")
        raw = params.get(PARAM)
        if raw is None:
            return NO_HINTS
        if not isinstance(raw, Mapping):
            return self._ignore(PARAM, "must be an object")
        if len(raw) > MAX_NAMES:
            return self._ignore(PARAM, f"has more than {MAX_NAMES} names")
        good: dict[str, Any] = {}
        for name, value in raw.items():
            if name not in _FIELDS:
                self._ignore(name, f"unknown; known are {', '.join(_FIELDS)}")
            elif name not in self._allowed:
                self._counters["hints_not_allowed"] += 1
                self._warn(name, "not among the hints that client_hints allows")
            else:
                try:
                    good[name] = msgspec.convert(value, _FIELDS[name].type, strict=True)
                except msgspec.ValidationError as error:
                    self._ignore(name, str(error))
        if good.get("tiers"):
            if not tier_names.issuperset(good["tiers"]):
                self._ignore("tiers", f"known are {sorted(tier_names)}")
            good["tiers"] = tuple(name for name in good["tiers"] if name in tier_names)
        return Hints(**good)

    def _ignore(self, name: object, why: str) -> Hints:
        self._counters["hints_ignored"] += 1
        self._warn(name, why)
        return NO_HINTS

    def _warn(self, name: object, why: str) -> None:
        """Log one line a minute at most; the client's name in it is short and escaped."""
        now_s = self._now_s()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + WARNING_INTERVAL_S
        shown = ascii(name[:MAX_NAME_CHARS]) if isinstance(name, str) else type(name).__name__
        log.warning(
            "hint %s of a request is ignored: %s (%d ignored, %d not allowed so far)",
            shown,
            why,
            self._counters["hints_ignored"],
            self._counters["hints_not_allowed"],
        )
