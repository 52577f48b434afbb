"""Where our log lines go under vLLM, whose way of configuring its logger is played here."""

import io
import logging

import pytest

from kvoffload.connectors.vllm.start import follow_vllm

STORE = logging.getLogger("kvoffload.backends.redis.node")


@pytest.fixture(autouse=True)
def loggers():
    """Let both loggers be as new, and give them back as they were: vLLM may be in this process."""
    both = [logging.getLogger(name) for name in ("kvoffload", "vllm")]
    before = [(each.handlers[:], each.level, each.propagate, each.parent) for each in both]
    for each in both:
        each.setLevel(logging.NOTSET)
        each.handlers[:], each.propagate, each.parent = [], True, logging.getLogger()
    yield both
    for each, (handlers, level, propagate, parent) in zip(both, before, strict=True):
        each.handlers[:] = handlers
        each.setLevel(level)
        each.propagate, each.parent = propagate, parent


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
