"""Facts as they are stored for people: the model's name, and how two namespaces differ.

They come from a store, so each text is of any length and of any characters.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvoffload.identity import LABEL

_MODEL_NAMES = (f"{LABEL}model", "model", "model_path")
"""Facts that name the model, the first that is there; engines without labels have the other two."""


class Difference(NamedTuple):
    """A fact that two namespaces do not share; None: one of them has none of this name."""

    name: str
    one: str | None
    other: str | None


def model_of(facts: Mapping[str, Any]) -> str:
    """Return the last part of the model's name or path; empty where no fact tells it.

    A snapshot of a hub's cache, ``models--Org--Name/snapshots/COMMIT``, has the name of its model.
    """
    told = next((str(facts[name]) for name in _MODEL_NAMES if facts.get(name)), "")
    parts = [part for part in told.split("/") if part]
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else ""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return facts with different values: those that both have, then the rest; without labels."""
    found = [each for each in compared(one, other) if each.one != each.other]
    found = [each for each in found if not each.name.startswith(LABEL)]
    return sorted(found, key=lambda each: None in each)


def compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield each fact of two namespaces, in order of the names."""
    for name in sorted(one.keys() | other.keys()):
        yield Difference(name, _text(one.get(name)), _text(other.get(name)))


def escaped(text: object, limit: int | None = None) -> str:
    """Return a text without control characters, cut to a length."""
    whole = str(text)
    cut = whole if limit is None or len(whole) <= limit else f"{whole[:limit]}…"
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in cut)


def excerpts(one: str, other: str, limit: int) -> tuple[str, str]:
    """Return two texts, :func:`escaped` and cut to a length, from shortly before they differ."""
    pairs = enumerate(zip(one, other, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), 0) - limit // 4
    if start <= 0 or max(len(one), len(other)) <= limit:
        return escaped(one, limit), escaped(other, limit)
    return f"…{escaped(one[start:], limit)}", f"…{escaped(other[start:], limit)}"


def _text(value: object) -> str | None:
    return None if value is None else str(value)
