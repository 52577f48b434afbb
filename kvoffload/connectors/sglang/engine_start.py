"""A name of this start of SGLang, which no other start has."""

import multiprocessing
import os
import time
import uuid
from functools import cache

_VARIABLE = "KVOFFLOAD_START"
BEGUN_NS = time.time_ns()
"""When SGLang has loaded its plug-ins in this process, before it loads weights."""


def begin_start() -> None:
    """Name a start in the process that reads the command line; its ranks inherit the name."""
    if multiprocessing.parent_process() is None:
        os.environ[_VARIABLE] = uuid.uuid4().hex


@cache
def _own() -> str:
    return uuid.uuid4().hex


def start_name() -> str:
    """Return the name of this start: the same in all ranks of a host, another after a restart."""
    return os.environ.get(_VARIABLE) or _own()
