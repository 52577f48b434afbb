"""A server that answers requests of an S3 client as a test says: wrongly, late, or not at all."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.support.moto import PATIENT_S, login


class Answer(NamedTuple):
    """What the server says; ``length`` lies about the body if it is given."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    length: int | None = None


def error(status: int, code: str, message: str = "m") -> Answer:
    """An answer as S3 gives it."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, text.encode())


def whole(content: bytes, modified: str = "Sun, 22 Nov 2026 01:58:41 GMT") -> Answer:
    """An object."""
    return Answer(200, content, {"ETag": '"e"', "Last-Modified": modified})


MISSING = error(404, "NoSuchKey")
STORED = Answer(200, b"", {"ETag": '"e"'})


class S3StandIn:
    """Runs the server on threads while it is entered; ``answer`` may be changed at any time."""

    def __init__(self, answer: Callable[[str, str], Answer]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.sent: list[dict[str, str]] = []
        """The headers of each request."""
        self.bodies: dict[str, bytes] = {}
        """The content of the latest PUT by its path."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.command == "PUT":
                    stand_in.bodies[self.path] = body
                stand_in.asked.append((self.command, self.path))
                stand_in.sent.append(dict(self.headers))
                status, body, headers, length = stand_in.answer(self.command, self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body) if length is None else length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def options(self, **more: object) -> dict[str, object]:
        """Settings of a tier on this server."""
        endpoint = f"http://127.0.0.1:{self.port}"
        place = {"url": "s3://bucket/kv", "endpoint": endpoint}
        return {**place, **login(), "timeout_s": PATIENT_S, **more}

    def __enter__(self) -> "S3StandIn":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
