"""Serves an engine's control socket, and hands an operator's orders to the engine's thread.

The server's thread sleeps until an operator connects. It serves one connection after the other.
"""

import errno
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from socket import SHUT_RDWR, socket
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import msgspec

from kvoffload.control import (
    HELLO_S,
    ORDER_S,
    Answer,
    Clear,
    EngineFacts,
    Folder,
    Found,
    Lookup,
    Question,
    check_user,
    decode_question,
    folders,
    is_supported,
    receive,
    send,
)
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Iterator[T | None]
"""An order's steps on the engine's thread, each of them short; what is not None is the answer."""
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_servers: "WeakSet[ControlServer]" = WeakSet()


class Refused(Exception):
    """An order that the engine does not carry out, and why."""


class _Order(Generic[T]):
    """An order, from its arrival to its end."""

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.has_begun = False
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None


class Orders:
    """Lets the engine's thread carry out orders that come from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.order: _Order[Any] | None = None
        """What :meth:`step` has to do; looked at in each step of an engine."""
        self.wake: Callable[[], None] = lambda: None
        """Lets an idle engine step."""

    def carry_out(self, work: Work[T], timeout_s: float) -> T:
        """Wait until the engine's thread has carried out an order.

        Raises:
            Refused: it has not in time.
        """
        order = _Order(work)
        self.order = order
        self.wake()
        order.ended.wait(timeout_s)
        with self._lock:
            self.order = None
        if order.error is not None:
            raise order.error
        if order.result is not None:
            return order.result
        if order.has_begun:
            raise Refused(f"not done after {timeout_s:g} s; what has begun goes on")
        raise Refused("nothing was done: the engine takes no step; ask while it serves requests")

    def step(self) -> None:
        """Go on with the order, on the engine's thread, between two of its steps."""
        with self._lock:
            if (order := self.order) is not None:
                order.has_begun = True
        if order is None:
            return
        try:
            order.result = next(order.work)
        except Exception as error:
            order.error = error
        if order.result is not None or order.error is not None:
            with self._lock:
                if self.order is order:  # and not the next one, after its time was over
                    self.order = None
            order.ended.set()


class Operated(ABC):
    """An engine of which operators ask; what they ask is called on the server's thread."""

    def __init__(self) -> None:
        self.orders = Orders()
        """Those that the engine's thread carries out."""
        self._server: ControlServer | None = None

    def serve(self, is_wanted: bool) -> None:
        """Open a control socket; the engine goes on without one, and the log says why."""
        if is_wanted and is_supported():
            try:
                self._server = ControlServer(self)
            except (OSError, ConfigError) as error:
                text = "kvoffload cache cannot ask this engine: it has no control socket: %s"
                log.warning(text, error)

    def close(self) -> None:
        """Close the control socket. Idempotent."""
        if self._server is not None:
            self._server.close()

    @abstractmethod
    def facts(self) -> EngineFacts:
        """Return what the engine is."""

    @abstractmethod
    def lookup(self, token_ids: list[int], salt: str) -> Work[Found]:
        """Return the steps that find a prompt; raises :class:`Refused`."""

    @abstractmethod
    def clear(self, tier: str) -> Work[str]:
        """Return the steps that empty a tier; they end with what is wrong, "" for nothing."""


class ControlServer:
    """A socket for the operators of one engine.

    Args:
        engine: carries out the orders.

    Raises:
        OSError, ConfigError: there is no place for the socket.
    """

    def __init__(self, engine: Operated) -> None:
        self._engine = engine
        self._folder, self._sock, self._name = _listen()
        self._user = os.geteuid()
        self._thread = threading.Thread(target=self._run, name="kvoffload-control", daemon=True)
        self._thread.start()
        _servers.add(self)

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno not in _SCARCE:
                    return  # closed
                time.sleep(1.0)
                continue
            with sock:
                try:
                    self._serve(sock)
                except OSError:  # the other end is gone, or too slow
                    pass
                except Exception:
                    log.exception("an operator's question failed")

    def _serve(self, sock: socket) -> None:
        check_user(sock, self._user, 0)
        data = receive(sock, HELLO_S)
        if not data:
            return  # another engine looks whether this one lives
        try:
            answer = self._answer(decode_question(data))
        except (Refused, msgspec.DecodeError) as error:
            answer = Answer(error=str(error))
        except Exception as error:
            log.exception("an operator's order failed")
            answer = Answer(error=f"the order failed: {error!r}")
        send(sock, answer, HELLO_S)

    def _answer(self, question: Question) -> Answer:
        facts = self._engine.facts()
        if isinstance(question, Lookup):
            work = self._engine.lookup(question.token_ids, question.salt)
            return Answer(engine=facts, found=self._engine.orders.carry_out(work, ORDER_S / 2))
        if isinstance(question, Clear):
            if question.tier and question.tier not in facts.tiers:
                known = ", ".join(facts.tiers)
                raise Refused(f"there is no tier {question.tier!r}; tiers: {known}")
            log.warning("an operator clears %s", question.tier or "all tiers")
            work_of_clear = self._engine.clear(question.tier)
            wrong = self._engine.orders.carry_out(work_of_clear, ORDER_S / 2)
            return Answer(error=wrong, engine=facts)
        return Answer(engine=facts)

    def close(self) -> None:
        """Remove the socket, and wait for the thread unless it carries out an order. Idempotent."""
        if self in _servers:
            _servers.discard(self)
            self._folder.remove(self._name)
            self._sock.shutdown(SHUT_RDWR)
            self._sock.close()
            self._folder.close()
            self._thread.join(0.1)

    def forget(self) -> None:
        """Close what a forked process has inherited; its engine is another process."""
        self._sock.close()
        self._folder.close()


def _listen() -> tuple[Folder, socket, str]:
    """Listen in the first folder that can be had."""
    failure: Exception | None = None
    for path in folders():
        try:
            folder = Folder(path, create=True)
        except (OSError, ConfigError) as error:
            failure = failure or error
            continue
        try:
            return folder, *folder.listen()
        except OSError as error:
            folder.close()
            failure = failure or error
    raise failure or OSError("there is no folder")


def _forget_inherited() -> None:
    for server in list(_servers):
        server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_inherited)
