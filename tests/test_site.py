"""The documentation site: every page is in it, it needs no network, and it can be searched."""

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support import browser

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


@pytest.fixture(scope="module")
def site(sources):
    """The folder of the built site."""
    if ZENSICAL is None:
        pytest.skip("zensical is missing (make docs installs it)")
    config = (ROOT / "zensical.toml").read_text()
    folder = sources.parent
    (folder / "zensical.toml").write_text(config.replace("build/", ""))
    words = [ZENSICAL, "build", "--strict"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_it_builds_without_a_warning_loads_nothing_foreign_and_finds_words(site):
    for page in site.rglob("*.html"):
        assert not FOREIGN.search(page.read_text()), page.name
    index = json.dumps(json.loads((site / "search.json").read_text()))
    assert "KVOffloadTierDown" in index
    assert "metrics_port" in index


class Prose(HTMLParser):
    """The text of a page outside code, programs and pictures."""

    APART = ("code", "pre", "script", "style", "svg")

    def __init__(self, page):
        super().__init__()
        self.inside, self.text = 0, ""
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.inside += tag in self.APART

    def handle_endtag(self, tag):
        self.inside -= tag in self.APART

    def handle_data(self, data):
        self.text += "" if self.inside else data


MARKDOWN = re.compile(r"```|^ *(?:\|.*\||[*-] |#+ ).*|\]\(|\*\*\w", re.MULTILINE)


def test_no_page_shows_markdown_as_text(site):
    """A reader that differs from GitHub's takes no fence, table or list for text."""
    for page in site.rglob("*.html"):
        if shown := MARKDOWN.search(Prose(page).text):
            raise AssertionError(f"{page.relative_to(site)}: {shown[0]}")


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


FOUND = """(() => {
  const pages = []
  for (const each of document.querySelectorAll("*"))
    for (const link of each.shadowRoot?.querySelectorAll("a") ?? []) pages.push(link.href)
  return pages.join(" ")
})()"""
"""The links of the dialog, which is in a shadow tree."""


@pytest.fixture(scope="module")
def address(site):
    """Serves the site while the tests run."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


needs_browser = pytest.mark.skipif(not browser.BINARY, reason=browser.MISSING)
BROKEN = """[...document.querySelectorAll("td code")]
  .filter(name => name.getClientRects().length > 1).map(name => name.innerText).join(" ")"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).join(' ')"


@needs_browser
def test_no_table_breaks_a_name_and_dark_is_dark(address, tmp_path):
    with browser.browsing(tmp_path) as tab:
        for scheme, is_right in (("light", lambda c: c > 200), ("dark", lambda c: c < 60)):
            tab.prefer(scheme)
            tab.open(f"{address}/docs/reference/metrics.html")
            assert tab.evaluate(BROKEN) == ""
            colours = [int(part) for part in tab.evaluate(BACKGROUND).split()[:3]]
            assert all(map(is_right, colours)), (scheme, colours)


@needs_browser
@pytest.mark.parametrize(
    ("typed", "page"),
    [
        ("KVOffloadTierDown", "runbook.html"),
        ("otel_spans", "settings.html?h=otel_spans#otel_spans"),
        ("verify", "operate.html"),
    ],
)
def test_a_reader_searches_in_a_real_browser(address, tmp_path, typed, page):
    with browser.browsing(tmp_path) as tab:
        tab.open(f"{address}/index.html")
        button = "document.querySelector('.md-search__button')"
        tab.until(f"{button} !== null")
        tab.evaluate(f"{button}.click()")
        tab.until("document.activeElement.shadowRoot !== null")
        tab.type(typed)
        found = tab.until(f"{FOUND}.split(' ').find(link => link.includes({json.dumps(page)}))")
        tab.open(found)
        assert typed in tab.evaluate("document.body.innerText")
