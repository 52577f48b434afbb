"""A real Prometheus with the example's rules."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.redis_server import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "observability"
RULES = (EXAMPLE / "kvoffload.rules.yml").read_text()
NEEDED = "needs prometheus and promtool (Debian's package prometheus)"
Ask = Callable[..., list[Any]]


def scrape(port: int) -> dict[str, float]:
    """Return the value of each series of an endpoint, by its name and labels as written."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@contextmanager
def scraping(target: int, folder: Path, instead_of: int = 9401, server: int = 0) -> Iterator[Ask]:
    """Scrape an engine's port each second; yield a function that asks until there is an answer.

    The port takes the place of one in the example's configuration: 8000 is vLLM's. So does that of
    a server of the host, if there is one. The rules wait for a second where the example's wait for
    minutes.
    """
    port = free_port()
    config = (EXAMPLE / "prometheus.yml").read_text().replace(": 5s", ": 1s")
    # Nobody hears of a test's alerts: nothing listens at port 1.
    for theirs, ours in {instead_of: target, 9402: server or 9402, 9093: 1}.items():
        config = config.replace(f"localhost:{theirs}", f"127.0.0.1:{ours}")
    (folder / "prometheus.yml").write_text(config)
    (folder / "kvoffload.rules.yml").write_text(re.sub(r"for: \d+m", "for: 1s", RULES))
    words = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/prometheus",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)

    def query(expression: str) -> list[Any]:
        asked = urllib.parse.urlencode({"query": expression})
        address = f"http://127.0.0.1:{port}/api/v1/query?{asked}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
        return found

    def ask(expression: str, limit_s: float = 30.0) -> list[Any]:
        until_s = time.monotonic() + limit_s
        while True:
            try:
                found = query(expression)
            except OSError:
                found = []
            if found or time.monotonic() > until_s:
                return found
            time.sleep(0.2)

    try:
        yield ask
    finally:
        process.kill()
        process.wait()
