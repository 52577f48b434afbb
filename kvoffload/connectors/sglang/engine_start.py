"""A name of this start of SGLang, which no other start has."""

import os
import time
import uuid
from functools import cache
from typing import Any

PUBLISH = "sglang.srt.runtime_context.publish"
_VARIABLE = "KVOFFLOAD_START"
BEGUN_NS = time.time_ns()
"""When SGLang has loaded its plug-ins in this process, before it loads weights."""


def before_publish(args: Any, *, role: str, **kwargs: Any) -> None:
    """Name a start in the process that is about to launch its ranks, which inherit the name.

    A program may launch several engines, each in a process that has inherited an earlier name.
    """
    if role == "tokenizer":
        os.environ[_VARIABLE] = uuid.uuid4().hex


@cache
def _own() -> str:
    return uuid.uuid4().hex


def start_name() -> str:
    """Return the name of this start: the same in all ranks of a host, another after a restart."""
    return os.environ.get(_VARIABLE) or _own()
