"""Write the sources of the documentation site: ``make docs`` builds it from them.

``python tools/site.py FOLDER`` copies the documents and the files that they link to. Each keeps its
place, so that relative links lead where they lead in the repository.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "examples/*/*.md", "kvoffload/demo/README.md")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)|\bsrc=\"([^\"]+)\"")
HOME = "index.md"
STYLE = ROOT / "docs" / "site.css"


def main() -> int:
    """Write the folder; what it held before is removed."""
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    _copy(STYLE, target)
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    for page in pages:
        _copy(page, target)
        for linked in _linked(page):
            _copy(linked, target)
    (target / "README.md").rename(target / HOME)
    for page in target.rglob("*.md"):
        page.write_text(_to_home(page.read_text()))
    return 0


def _copy(path: Path, target: Path) -> None:
    copy = target / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)


def _linked(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to and that are no pages."""
    for match in LINK.finditer(page.read_text()):
        link = match[1] or match[2]
        if "://" in link or link.startswith("mailto:"):
            continue
        path = (page.parent / link).resolve()
        if path.is_relative_to(ROOT) and path.exists() and path.suffix != ".md":
            yield path


def _to_home(text: str) -> str:
    """Let links to the README of the repository lead to the first page of the site."""
    return re.sub(r"\]\(((?:\.\./)+)README\.md([#)])", rf"](\1{HOME}\2", text)


if __name__ == "__main__":
    sys.exit(main())
