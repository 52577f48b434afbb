"""Write the reference page of the public names of ``kvoffload`` from their docstrings.

``python tools/api_reference.py`` writes ``docs/reference/api.md``.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
HEAD = """# Python names

<!-- Written by tools/api_reference.py from the docstrings: change them, then run it. -->

What `from kvoffload import …` offers to engines, and to authors of backends and policies. Other
names in modules may change between versions.
"""
LISTS, PARAGRAPHS = ("Args:", "Raises:"), ("Returns:", "Yields:")
"""The sections of a docstring."""
BUILT_IN = ("Create and return a new object.", "Initialize self.")
"""What Python says of a class that has no text of its own."""


def page() -> str:
    """Return the text of the page."""
    return HEAD + re.sub(r"\n{3,}", "\n\n", "\n".join(_entries())).rstrip() + "\n"


def _entries() -> Iterator[str]:
    import kvoffload

    for name in sorted(kvoffload.__all__, key=str.lower):
        if not name.startswith("_"):
            yield from _entry(name, getattr(kvoffload, name))


def _entry(name: str, thing: Any) -> Iterator[str]:
    home = getattr(thing, "__module__", "kvoffload")
    yield from ("", f"## {name}", "", f"In `{home}`.", "")
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"A type of its own for `{thing.__supertype__.__name__}`."
        return
    yield from ("```text", f"{name}{_signature(thing)}", "```", "")
    yield from _text(inspect.getdoc(thing) or "")
    if inspect.isclass(thing):
        for each, member in _members(thing):
            yield from ("", f"### {name}.{each}", "", *_text(inspect.getdoc(member) or ""))


def _signature(thing: Any) -> str:
    """Return the parameters without their types, which the docstring explains."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return "" if shown == "(*args, **kwargs)" else shown.replace("<factory>", "…")


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class has documented itself."""
    for name, member in vars(thing).items():
        if name.startswith("_") or not (doc := inspect.getdoc(member)):
            continue
        if doc.startswith(BUILT_IN):
            continue
        if inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod):
            yield name, member


def _text(doc: str) -> Iterator[str]:
    """Turn a docstring into Markdown: sections become headings in bold, parameters a list."""
    doc = re.sub(r":\w+:`~?(?:[\w.]*\.)?([\w()]+)`", r"`\1`", doc).replace("``", "`")
    is_section = is_list = False
    for line in doc.splitlines():
        if line in LISTS + PARAGRAPHS:
            is_section, is_list = True, line in LISTS
            yield from ("", f"**{line[:-1]}**", "")
        elif is_section and re.match(r" {4}\S", line):
            yield f"* {line.strip()}" if is_list else line.strip()
        elif is_section and line.strip():
            yield f"  {line.strip()}"
        else:
            is_section = is_section and not line.strip()
            yield line


if __name__ == "__main__":
    PAGE.write_text(page())
