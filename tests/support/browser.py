"""A real headless Chromium, told what to do over a pipe."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
MISSING = "needs chromium (Debian's package chromium)"
PATIENCE_S = 30.0


class Page:
    """A tab of the browser."""

    def __init__(self, orders: Any, answers: Any) -> None:
        self._orders, self._answers = orders, answers
        self._last = 0
        self._session = ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def open(self, address: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._ask("Page.navigate", url=address)
        self.until("document.readyState == 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true; AssertionError: it never is."""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < until_s, f"{expression} stays {found!r}"
            time.sleep(0.05)
        return found

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._ask("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        """Say that the reader's system asks for this scheme of colours: light or dark."""
        wish = {"name": "prefers-color-scheme", "value": scheme}
        self._ask("Emulation.setEmulatedMedia", features=[wish])

    def _ask(self, method: str, **params: Any) -> Any:
        self._last += 1
        order = {"id": self._last, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        self._orders.write(json.dumps(order).encode() + b"\0")
        while True:
            answer = json.loads(_message(self._answers))
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]


def _message(answers: Any) -> bytes:
    """Read up to the zero that ends a message."""
    message = bytearray()
    while (byte := answers.read(1)) != b"\0":
        assert byte, "the browser has ended"
        message += byte
    return bytes(message)


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in a folder; yield a tab."""
    orders_out, orders_in = os.pipe()
    answers_out, answers_in = os.pipe()
    words = [
        *(BINARY, "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}"),
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,800"),
        *("--no-first-run", "--disable-background-networking", "about:blank"),
    ]
    with (folder / "browser.log").open("w") as log:
        process = subprocess.Popen(
            # The browser reads orders from 3 and writes answers to 4.
            ["bash", "-c", f'exec "$0" "$@" 3<&{orders_out} 4>&{answers_in}', *words],
            pass_fds=(orders_out, answers_in),
            stdout=log,
            stderr=log,
        )
    os.close(orders_out)
    os.close(answers_in)
    with os.fdopen(orders_in, "wb", 0) as orders, os.fdopen(answers_out, "rb") as answers:
        try:
            yield Page(orders, answers)
        finally:
            process.kill()
            process.wait()
