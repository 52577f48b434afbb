"""Where our log lines go under vLLM, whose way of configuring its logger is played here."""

import io
import logging

import pytest

from kvoffload.connectors.vllm import start
from kvoffload.connectors.vllm.start import follow_vllm

STORE = logging.getLogger("kvoffload.backends.redis.node")
AWAY = "redis at %s is left alone until it answers again: %s"


@pytest.fixture(autouse=True)
def loggers():
    """Give both loggers back as they were."""
    both = [logging.getLogger(name) for name in ("kvoffload", "vllm")]
    before = [(each.handlers[:], each.level, each.propagate) for each in both]
    yield both
    for each, (handlers, level, propagate) in zip(both, before, strict=True):
        each.handlers[:] = handlers
        each.setLevel(level)
        each.propagate = propagate


def lines_of(logger, level=logging.INFO):
    """Configure a logger as vLLM does its own; return where its lines go."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("(%(process)d) %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return lambda: [line.partition(") ")[2] for line in stream.getvalue().splitlines()]


def test_lines_have_vllms_format_and_level(loggers):
    said = lines_of(loggers[1])
    follow_vllm(configures=True)
    STORE.debug("not at this level")
    STORE.info("%d host slots", 4)
    STORE.warning("trouble")
    assert said() == ["INFO 4 host slots", "WARNING trouble"]


def test_a_later_configuration_of_vllm_is_followed(loggers):
    earlier = lines_of(loggers[1])
    follow_vllm(configures=True)
    said = lines_of(loggers[1], logging.DEBUG)  # as each process does for itself
    follow_vllm(configures=True)
    STORE.debug("details")
    assert said() == ["DEBUG details"]
    assert earlier() == []


def test_the_root_logger_is_asked_as_vllms_logger_asks_it(loggers, caplog):
    lines_of(loggers[1])
    follow_vllm(configures=True)
    STORE.warning("only to vLLM's handler")
    assert caplog.messages == []
    loggers[1].propagate = True
    STORE.warning("to both, and to each once")
    assert caplog.messages == ["to both, and to each once"]


@pytest.mark.parametrize("configures", [False, True], ids=["told not to", "has not yet"])
def test_nothing_is_touched_where_vllm_does_not_configure_logging(loggers, caplog, configures):
    ours, theirs = loggers
    theirs.handlers[:] = []
    theirs.setLevel(logging.NOTSET)
    if not configures:
        lines_of(theirs)  # by hand
    follow_vllm(configures)
    assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True)
    STORE.warning("trouble")
    assert caplog.messages == ["trouble"]


def test_handlers_and_levels_of_the_user_stay(loggers):
    ours, theirs = loggers
    to_vllm = lines_of(theirs)
    ours.setLevel(logging.ERROR)
    follow_vllm(configures=True)
    STORE.warning("below the level that the user set")
    assert to_vllm() == []
    to_user = lines_of(ours)
    follow_vllm(configures=True)
    STORE.info("here")
    assert (to_user(), to_vllm()) == (["INFO here"], [])


def test_a_change_of_a_stores_state_is_said_once_for_all_that_notice_it(loggers):
    said = lines_of(loggers[1])
    follow_vllm(configures=True)
    for address in ("a:1", "b:1"):
        for _half in ("scheduler", "worker"):
            STORE.warning(AWAY, address, "refused")
    STORE.warning("redis at %s is back", "a:1")
    STORE.warning("redis at %s is back", "a:1")
    STORE.warning(AWAY, "a:1", "refused")
    away, back = "WARNING " + AWAY, "WARNING redis at a:1 is back"
    assert said() == [
        away % ("a:1", "refused"),
        away % ("b:1", "refused"),
        back,
        away % ("a:1", "refused"),
    ]


def test_what_goes_on_is_said_again_after_a_while(loggers, monkeypatch):
    said = lines_of(loggers[1])
    follow_vllm(configures=True)
    now_s = 1000.0
    monkeypatch.setattr(start.time, "monotonic", lambda: now_s)
    for now_s in (1000.0, 1040.0, 1061.0, 1100.0):  # noqa: B007 - read by the clock
        STORE.warning("disk %s: writing paused, %s", "/kv", "full")
    assert len(said()) == 2


def test_tracebacks_are_never_left_out_and_memory_is_bounded(loggers):
    said = lines_of(loggers[1])
    follow_vllm(configures=True)
    for _ in range(2):
        try:
            raise OSError("broken")
        except OSError:
            STORE.exception("a task failed")
    assert said().count("ERROR a task failed") == 2
    (handler,) = loggers[0].handlers
    for i in range(1000):
        STORE.warning("disk: cannot read %s", i)
    assert len(handler._last) <= 256
