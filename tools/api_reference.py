"""Write the reference page of the public names of ``kvoffload`` from their docstrings.

``python tools/api_reference.py`` writes ``docs/reference/api.md``.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import EnumType
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
HEAD = """# Python names

<!-- Written by tools/api_reference.py from the docstrings: change them, then run it. -->

What `from kvoffload import …` offers to engines, and to authors of backends and policies. Other
names in modules may change between versions.
"""
WIDTH = 88
"""Columns of a call on one line."""
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
    yield from ("", f"## {name}", "")
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"A type of its own for `{thing.__supertype__.__name__}`."
        return
    yield from _call(name, thing)
    yield from _text(inspect.getdoc(thing) or "")
    if inspect.isclass(thing):
        yield from _fields(thing)
        for each, member in _members(thing):
            yield from ("", f"### {name}.{each}", "", *_call(each, member))
            yield from _text(inspect.getdoc(member) or "")


def _call(name: str, thing: Any) -> Iterator[str]:
    """Yield how a thing is called, with types, one argument a line where it is long."""
    if isinstance(thing, property):
        result = _type(_hints(thing.fget).get("return"))
        yield from ("```text", f"{name}: {result}", "```", "")
        return
    if isinstance(thing, EnumType):  # not called; and Python 3.12 names other arguments than 3.11
        return
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return
    arguments = [*_arguments(signature, _hints(thing))]
    returned = "" if inspect.isclass(thing) else f" -> {_type(_hints(thing).get('return'))}"
    begin = "async def " if inspect.iscoroutinefunction(thing) else ""
    line = f"{begin}{name}({', '.join(arguments)}){returned}"
    if len(line) > WIDTH:
        listed = "".join(f"    {each},\n" for each in arguments)
        line = f"{begin}{name}(\n{listed}){returned}"
    if arguments != ["*args", "**kwargs"]:
        yield from ("```text", line, "```", "")


def _arguments(signature: inspect.Signature, hints: dict[str, Any]) -> Iterator[str]:
    is_named = False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not is_named:
            yield "*"
        is_named |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        if each.name == "self":
            continue
        text = str(each.replace(annotation=each.empty, default=each.empty))
        if kind := hints.get(each.name):
            text += f": {_type(kind)}"
        if each.default is not each.empty:
            text += " = " + re.sub(r"<.*>", "...", repr(each.default))
        yield text


def _hints(thing: Any) -> dict[str, Any]:
    """Return the types of arguments, and of what is returned: as objects, else as written."""
    parts = [thing, thing.__init__] if inspect.isclass(thing) else [thing]
    found: dict[str, Any] = {}
    for part in parts:
        try:
            found |= get_type_hints(part)
        except NameError:  # a name that type checkers alone import
            found |= getattr(part, "__annotations__", {})
    return found


def _type(hint: Any) -> str:
    """Return a type without the modules of its names."""
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+|~", "", text).replace("NoneType", "None")
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", text)


def _fields(thing: type) -> Iterator[str]:
    """Yield the fields that have a text below them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = []
    for field, text in pairwise(body.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        described = " ".join("\n".join(_text(ast.literal_eval(text.value))).split())
        item = f"* `{ast.unparse(field.target)}`: {described}"
        lines += textwrap.wrap(item, 100, subsequent_indent="  ", break_on_hyphens=False)
    if lines:
        yield from ("", "**Fields**", "", *lines)


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods and properties documented by a class, or by bases without a public name."""
    import kvoffload

    bases = [base for base in thing.__mro__[1:] if base.__module__.startswith("kvoffload.")]
    private = [base for base in bases if base.__name__ not in kvoffload.__all__]
    found: dict[str, Any] = {}
    for each in (thing, *private):
        found = found | {name: value for name, value in vars(each).items() if name not in found}
    for name, member in found.items():
        if name.startswith("_") or not (doc := inspect.getdoc(member)):
            continue
        if doc.startswith(BUILT_IN):
            continue
        if inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod):
            yield name, member if isinstance(member, property) else getattr(thing, name)


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
