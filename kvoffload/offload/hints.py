"""What a request may ask of offloading, in its ``kv_transfer_params`` under ``"kvoffload"``.

For instance ``{"kvoffload": {"tiers": ["disk"], "max_load_tokens": 4096}}``. A hint is a wish: one
that is unknown or makes no sense is ignored, counted, and warned about once.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from kvoffload.offload.base import ReqContext

log = logging.getLogger(__name__)

PARAM = "kvoffload"
REMEMBERED_REQUESTS = 1024


class Hints(msgspec.Struct, frozen=True):
    """The wishes of one request; the defaults are what a request gets that has none."""

    offload: bool = True
    """False: none of its chunks are stored."""
    tiers: tuple[str, ...] | None = None
    """Only these tiers are read and written below host memory; None for all, () for none."""
    max_load_tokens: int | None = None
    """Tokens to load at most; the connector obeys it."""
    priority: int = 0
    """Of the chunks it stores: those below 0 leave host memory first, those above 0 last."""
    explain: bool = False
    """True: say with its output where each chunk of its prompt was found, or why it was not."""


NO_HINTS = Hints()
_FIELDS = {field.encode_name: field for field in msgspec.structs.fields(Hints)}


class HintReader:
    """Reads hints, once a request; counts and reports what it ignores.

    Args:
        counters: where ``hints_ignored`` is counted.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        # Request → its hints as they were given, and as they were read.
        self._read: OrderedDict[str, tuple[object, Hints]] = OrderedDict()
        self._warned: set[str] = set()

    def hints(self, context: ReqContext | None, tier_names: frozenset[str]) -> Hints:
        """Return what a request asks for; ``tier_names`` are those that exist."""
        if context is None or not context.kv_transfer_params:
            return NO_HINTS
        params: object = context.kv_transfer_params  # from a client: may be anything
        if not isinstance(params, Mapping):
            self._ignore("kv_transfer_params", params, "must be an object")
            return NO_HINTS
        raw = params.get(PARAM)
        if raw is None:
            return NO_HINTS
        given, hints = self._read.get(context.req_id, (None, NO_HINTS))
        if given != raw:
            hints = self._parse(raw, tier_names)
            self._read[context.req_id] = raw, hints
            while len(self._read) > REMEMBERED_REQUESTS:
                self._read.popitem(last=False)
        return hints

    def _parse(self, raw: object, tier_names: frozenset[str]) -> Hints:
        if not isinstance(raw, Mapping):
            self._ignore(PARAM, raw, "must be an object")
            return NO_HINTS
        good: dict[str, Any] = {}
        for name, value in raw.items():
            field = _FIELDS.get(name)
            if field is None:
                self._ignore(str(name), value, f"unknown; known are {', '.join(_FIELDS)}")
                continue
            try:
                good[name] = msgspec.convert(value, field.type, strict=True)
            except msgspec.ValidationError as error:
                self._ignore(name, value, str(error))
        if "tiers" in good and good["tiers"] is not None:
            if unknown := set(good["tiers"]) - tier_names:
                self._ignore("tiers", sorted(unknown), f"known are {sorted(tier_names)}")
            good["tiers"] = tuple(name for name in good["tiers"] if name in tier_names)
        if (good.get("max_load_tokens") or 0) < 0:
            self._ignore("max_load_tokens", good.pop("max_load_tokens"), "must not be negative")
        return Hints(**good)

    def _ignore(self, name: str, value: object, why: str) -> None:
        self._counters["hints_ignored"] += 1
        if name not in self._warned and len(self._warned) < REMEMBERED_REQUESTS:
            self._warned.add(name)
            log.warning("hint %s = %.100r of a request is ignored: %s", name, value, why)
