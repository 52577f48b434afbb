"""Every counter the code can raise is explained to operators, and nothing else is."""

import ast
import errno
import os
import re
import stat
from itertools import chain
from pathlib import Path

import kvoffload.backends.disk.backend as package
from kvoffload.backends.disk.chunk_file import reason_of, strangeness
from kvoffload.backends.header import NOT_DAMAGED, counted_as

CODE = Path(package.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "counters.md"
COUNTING = {"count": 0, "_count": 0, "note_removed": 1, "discard": 1, "_discard": 1}
"""Methods that count, and the position of the reason."""


def calls(pattern):
    common = (CODE.parent / name for name in ("threaded.py", "counted.py"))
    for path in [*sorted(CODE.glob(pattern)), *common]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield node


def texts(node):
    """Return the possible texts of an argument, with ``*`` for an inserted value."""
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
        return ["".join(parts)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return []


def counted():
    """Texts given to whatever counts; those that are variables come from other such calls."""
    for call in calls("*.py"):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        at = COUNTING.get(name)
        if at is not None and len(call.args) > at:
            yield from (text for text in texts(call.args[at]) if isinstance(text, str))


def reasons():
    """Yield every reason of a failed file operation, from ``chunk_file`` and ``header``."""
    for error in (errno.ENOENT, errno.ELOOP, errno.EIO):
        yield reason_of(OSError(error, ""))
    for call in calls("chunk_file.py"):
        if isinstance(call.func, ast.Name) and call.func.id == "Outcome":
            yield from (text for text in texts(call.args[0]) if text and "*" not in text)
    code = ast.parse((CODE.parent / "header.py").read_text())
    parsers = ("parse_header", "check_sum", "mismatch")
    named = [each for each in code.body if isinstance(each, ast.FunctionDef)]
    for node in chain.from_iterable(ast.walk(each) for each in named if each.name in parsers):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from (counted_as(t) for t in texts(node.value) if isinstance(t, str))
    yield from map(counted_as, NOT_DAMAGED)
    for kind in (stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFLNK):
        yield strangeness(os.stat_result([kind, *[0] * 9]))
    yield "corrupt_size"
    yield "corrupt_short"


def possible():
    found = set(reasons())
    corrupt = {reason for reason in found if reason.startswith("corrupt_")}
    failing = found - corrupt
    every = set(corrupt)
    for text in counted():
        if text in ("*_stalled", "*_unsafe", "*_failed"):
            every |= {text.replace("*", kind) for kind in ("read", "write")}
        elif text == "read_*":
            every |= {f"read_{reason}" for reason in failing}
        elif text == "write_*":
            # A store verifies nothing: the only damage it can meet is a link.
            met = [*failing - NOT_DAMAGED, "corrupt_link"]
            every |= {f"write_{reason}" for reason in met}
        else:
            assert "*" not in text, f"counted, but not known here: {text}"
            every.add(text)
    return every


def explained():
    """Counters in the page's table; ``_x`` after ``corrupt_y`` is ``corrupt_x``, ``…`` any rest."""
    table = PAGE.read_text().split("## Disk")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    for row in rows:
        names = re.findall(r"`([^`]+)`", row)
        stem = names[0].split("_")[0]
        yield from (f"{stem}{name}" if name.startswith("_") else name for name in names)


def test_every_counter_is_explained_to_operators():
    names = set(explained())
    stems = tuple(name[:-1] for name in names if name.endswith("…"))
    missing = {name for name in possible() if name not in names and not name.startswith(stems)}
    assert not missing
    unknown = {name for name in names - possible() if not name.endswith("…")}
    assert not unknown


def test_the_counters_found_in_the_code_are_those_that_tests_see():
    """Fails when code counts in a way that this test does not understand."""
    seen = set(
        chain.from_iterable(
            re.findall(r'counters\(\)(?:\[|\.get\(| == \{)"(\w+)"', path.read_text())
            for path in Path(__file__).parent.glob("test_*.py")
        )
    )
    known = {name for name in seen if "_io_" not in name}
    assert len(known) > 8
    assert known <= possible()
