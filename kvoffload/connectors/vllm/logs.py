"""Our log lines in vLLM's log: in its format, at its level, each once. Imports nothing of vLLM.

vLLM gives the logger ``vllm`` a handler and a level, and no other logger. Without this module, our
lines below WARNING are dropped, and the rest have neither time nor level nor process.
"""

import logging
import time

REPEAT_S = 60.0
"""How long a line is not said again, unless something else is said of the same thing."""
_MAX_REMEMBERED = 256


def follow_vllm(configures: bool) -> None:
    """Send what the package logs where vLLM's own lines go; called again, follow what changed.

    Handlers that the logger ``kvoffload`` already has stay the only ones, and so does its level.

    Args:
        configures: whether vLLM configures logging (``VLLM_CONFIGURE_LOGGING``); if not, that is
            left to the root logger, as for every other package.
    """
    ours, theirs = logging.getLogger("kvoffload"), logging.getLogger("vllm")
    mine = next((each for each in ours.handlers if isinstance(each, ToVllm)), None)
    if mine is None:
        is_configured = bool(theirs.handlers) or theirs.level != logging.NOTSET
        if ours.handlers or not configures or not is_configured:
            return
        mine = ToVllm(theirs)
        ours.addHandler(mine)
        ours.propagate = False  # vLLM's logger propagates, or does not
    if ours.level in (logging.NOTSET, mine.level_given):
        mine.level_given = theirs.getEffectiveLevel()
        ours.setLevel(mine.level_given)


class ToVllm(logging.Handler):
    """Hands records to vLLM's logger, which may be given other handlers at any time.

    Both halves of the connector, and several ranks, notice the same change of a store's state. In
    one process it is said once; in several, vLLM's format names the process.
    """

    def __init__(self, theirs: logging.Logger) -> None:
        super().__init__()
        self.level_given = logging.NOTSET
        """The level that vLLM's logger had, if ours was given it."""
        self._theirs = theirs
        self._last: dict[tuple[str, str], tuple[str, float]] = {}
        """Logger and thing → the last line about it, and when it was said."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            repeated = self._is_repeated(record)
        except Exception:  # arguments that do not fit the text
            self.handleError(record)
            return
        if not repeated:
            self._theirs.handle(record)

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or record.exc_info:
            return False
        # What a line is about is its first argument: a server's address, a tier, a path.
        thing = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        text, now_s = record.getMessage(), time.monotonic()
        said, when_s = self._last.pop((record.name, thing), ("", 0.0))
        repeated = said == text and now_s - when_s < REPEAT_S
        self._last[record.name, thing] = (text, when_s if repeated else now_s)
        while len(self._last) > _MAX_REMEMBERED:
            del self._last[next(iter(self._last))]
        return repeated
