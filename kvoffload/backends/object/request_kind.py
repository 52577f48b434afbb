"""One kind of request to a bucket: counted, explained once, given up while most of them fail."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from kvoffload.backends.object.failures import BREAKER_OPEN, BUSY, CANCELLED, Failed, Failure
from kvoffload.backends.object.share_breaker import ShareBreaker

log = logging.getLogger(__name__)

Verb = Literal["lookup", "read", "write"]
SAY_AGAIN_S = 600.0
"""A failure of one reason is logged again after so long, also if the bucket comes and goes."""
T = TypeVar("T")


class Requests:
    """Sends requests of one kind, as long as enough of them are answered. Thread-safe.

    Args:
        verb: the kind.
        count: told the counter of each failure: ``read_lost_timeout``, ``refused_forbidden``.
        ask_for_reason: sends a request whose failure has more to tell than that of a HEAD.
    """

    def __init__(
        self, verb: Verb, count: Callable[[str], None], ask_for_reason: Callable[[], None]
    ) -> None:
        self._verb, self._count, self._ask_for_reason = verb, count, ask_for_reason
        self.breaker = ShareBreaker()
        """While it is open, no request is sent but one now and then."""
        self._asking, self._saying = threading.Lock(), threading.Lock()
        self._said_s: dict[str, float] = {}
        self._owes_word = False
        """Whether the log says that these requests pause."""

    def ask(self, work: Callable[[], T], *, is_test: bool = False) -> T:
        """Return what ``work`` returns; FileNotFoundError passes, as an answer.

        Args:
            work: sends the request.
            is_test: it moves no chunk, and only tells whether the bucket answers.

        Raises:
            Failed: the request failed, or was not sent.
        """
        if not self.breaker.admits():
            self._count(f"{self._verb}_{BREAKER_OPEN.reason}")
            raise Failed(BREAKER_OPEN)
        try:
            answer = work()
        except FileNotFoundError:
            self._succeeded(is_test)
            raise
        except Failed as failed:
            self._failed(failed.failure)
            raise
        self._succeeded(is_test)
        return answer

    def _succeeded(self, is_test: bool) -> None:
        if self.breaker.succeeded(is_test=is_test):
            with self._saying:
                owed, self._owes_word = self._owes_word, False
            if owed:
                log.warning("object: the bucket answers again (%ss)", self._verb)

    def _failed(self, failure: Failure) -> None:
        if failure in (CANCELLED, BUSY):  # the bucket was not asked
            self._count_as(failure)
            return
        opened = self.breaker.failed(at_once=failure.is_lasting)
        cause = self._behind(failure) if failure.is_vague else failure
        self._count_as(cause or failure)
        if cause is not None and (opened or failure.is_lasting):
            self._say(cause)

    def _count_as(self, failure: Failure) -> None:
        is_answer = failure.reason.startswith("refused_")
        self._count(failure.reason if is_answer else f"{self._verb}_{failure.reason}")

    def _behind(self, failure: Failure) -> Failure | None:
        """Return what is behind a bare status; None: another thread asks just now, and says it."""
        if not self._asking.acquire(blocking=False):
            return None
        try:
            self._ask_for_reason()
        except Failed as more:
            return more.failure if more.failure.is_lasting else failure
        finally:
            self._asking.release()
        return failure

    def _say(self, failure: Failure) -> None:
        now = time.monotonic()
        with self._saying:
            if now < self._said_s.get(failure.reason, -SAY_AGAIN_S) + SAY_AGAIN_S:
                return
            self._said_s[failure.reason], self._owes_word = now, True
        text = "object: %ss pause, until the bucket answers again: %s; %s"
        log.warning(text, self._verb, failure, failure.remedy)
