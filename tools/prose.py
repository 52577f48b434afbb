"""Check the language of docstrings, comments and documents: words to avoid, long sentences.

``make check`` runs it. Each finding names the file, the line, and the rule. A sentence has at most
25 words; inline code counts as one word. Lines of prose in documents have at most 100 characters.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
MOST_COLUMNS = 100
AVOID = re.compile(
    r"\b(whoever|nobody|somebody|others|anew|beside|what of|under way|on its way|hands? on|"
    r"lets? go|letting go|limbo|sightings?|departures|residence|interpreter's lock)\b",
    re.IGNORECASE,
)
END = re.compile(r"(?<=[.!?:;])[\s\"')\]*]+(?=[A-Z0-9`\"'(\[*]|$)|\n\s*\n|\n\s*[-*] |\n\s*\d+\. ")
ENTRY = re.compile(r"^(?=\s*(\*{0,2}\w+|``\w+``)( \([^)]*\))?:( |$))", re.MULTILINE)
"""Where an entry of ``Args:`` and the like begins, or such a section itself."""
TABLE = re.compile(r"^ *=+ +=+$.*^ *=+ +=+$", re.MULTILINE | re.DOTALL)
LITERAL = re.compile(r"(?<=::)\n\s*\n((?:[ \t]+.*\n|\s*\n)+)|^\s*\|.*$", re.MULTILINE)
MARK = re.compile(r"#( (type:|noqa|fmt:|mypy:)|!)")
CODE = re.compile(r"``[^`]+``|`[^`]+`|\[([^\]]*)\]\([^)]*\)|https?://\S+|:\w+:`[^`]+`")


class Text(NamedTuple):
    """A piece of prose and the line where it begins."""

    line: int
    text: str


def python_texts(source: str) -> Iterator[Text]:
    """Yield the docstrings of a module, and its comments, neighbouring lines joined."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(statement, ast.Expr) and isinstance(text, str):
                yield Text(statement.lineno, LITERAL.sub(blank, TABLE.sub(blank, text)))
    begun, lines, last = 0, [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or MARK.match(token.string):
            continue
        if token.start[0] != last + 1:
            if lines:
                yield Text(begun, "\n".join(lines))
            begun, lines = token.start[0], []
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    if lines:
        yield Text(begun, "\n".join(lines))


def blank(found: re.Match[str]) -> str:
    """Keep only the line breaks of a literal block or a table."""
    return "\n" * found.group(0).count("\n")


def document_texts(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a document: no code blocks, tables, headings or HTML."""
    fenced, begun, lines = False, 0, []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fenced ^= line.lstrip().startswith("```")
        apart = fenced or not line.strip() or re.match(r"\s*(```|\||#|<|!\[|\[[^\]]+\]:|---)", line)
        if apart or re.match(r"\s*([-*]|\d+\.) ", line):
            if lines:
                yield Text(begun, "\n".join(lines))
            lines = []
        if not apart:
            begun = begun if lines else number
            lines.append(line)


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a text, with its line within the text."""
    plain = CODE.sub(lambda found: found.group(1) or "code", text)
    for found in AVOID.finditer(plain):
        yield plain.count("\n", 0, found.start()), f"avoid {found.group(0)!r}"
    at = 0
    for sentence in END.split(ENTRY.sub("\n", text)):
        begin = " ".join(sentence.split()[:1])
        at = max(at, text.find(begin, at))
        plain = CODE.sub(lambda found: found.group(1) or "code", sentence)
        words = [word for word in plain.split() if re.search(r"\w", word)]
        if len(words) > MOST_WORDS:
            yield (
                text.count("\n", 0, at),
                f"{len(words)} words in a sentence: {' '.join(words[:6])} ...",
            )


def check(path: Path) -> Iterator[str]:
    """Yield the findings of one file."""
    source = path.read_text()
    name = path.relative_to(ROOT)
    is_code = path.suffix == ".py"
    for start, text in python_texts(source) if is_code else document_texts(source):
        for line, fault in faults(text):
            yield f"{name}:{start + line}: {fault}"
        for line, row in enumerate(text.splitlines()):
            if not is_code and len(row) > MOST_COLUMNS and " " in row.strip()[:MOST_COLUMNS]:
                yield f"{name}:{start + line}: {len(row)} columns"


def main() -> int:
    """Check the files and folders that are named."""
    found = 0
    for given in sys.argv[1:]:
        target = ROOT / given
        for path in sorted(target.rglob("*")) if target.is_dir() else [target]:
            if path.suffix in (".py", ".md") and not path.is_symlink():
                for finding in check(path):
                    print(finding)
                    found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
