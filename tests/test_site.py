"""The documentation site: every page is in it, it needs no network, and it can be searched."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ZENSICAL = shutil.which("zensical", path=f"{ROOT / '.venv-docs' / 'bin'}") or shutil.which(
    "zensical"
)
FOREIGN = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//", re.I)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "docs"
    subprocess.run([sys.executable, ROOT / "tools" / "site.py", folder], check=True)
    return folder


def named(entries):
    """Yield the pages of the navigation."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, list):
                yield from named(value)
            else:
                yield value


def test_the_navigation_names_pages_and_leaves_no_guide_or_reference_out(sources):
    pages = set(named(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert all((sources / page).is_file() for page in pages)
    for part in ("guides", "reference", "explanation"):
        for page in (ROOT / "docs" / part).glob("*.md"):
            assert str(page.relative_to(ROOT)) in pages


def test_links_lead_somewhere_in_the_sources_too(sources):
    for page in sources.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(sources)}: {link}"


@pytest.mark.skipif(ZENSICAL is None, reason="zensical is missing (make docs installs it)")
def test_it_builds_without_a_warning_loads_nothing_foreign_and_finds_words(sources):
    config = (ROOT / "zensical.toml").read_text()
    folder = sources.parent
    (folder / "zensical.toml").write_text(config.replace("build/", ""))
    words = [ZENSICAL, "build", "--strict"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = folder / "site"
    for page in site.rglob("*.html"):
        assert not FOREIGN.search(page.read_text()), page.name
    index = json.dumps(json.loads((site / "search.json").read_text()))
    assert "KVOffloadTierDown" in index
    assert "metrics_port" in index
