"""An engine in a process of its own, which the demo can kill: settings and prompts in, results out.

Between messages the engine keeps stepping, as a server's loop does, so that what it stores goes on
down to the disk.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch

from kvoffload.demo.mini_engine import Engine
from kvoffload.demo.sampling import SamplingParams
from kvoffload.errors import ConfigError, KVOffloadError

IDLE_S = 0.002
Message = dict[str, Any]
_SPAWN = multiprocessing.get_context("spawn")


class DemoError(KVOffloadError):
    """An engine process ended that should not have."""


class EngineProcess:
    """The parent's side.

    Raises:
        ConfigError: the engine refuses its settings.
        DemoError: the process ended unasked; so do all methods.
    """

    def __init__(self, settings: Message, threads: int, log: IO[str]) -> None:
        self._log_name = log.name
        self._pipe, theirs = _SPAWN.Pipe()
        given = (theirs, settings, threads, log.name)
        self._child = _SPAWN.Process(target=_serve_all, args=given)
        self._child.start()
        theirs.close()
        if "refused" in (answer := self._received()):
            raise ConfigError(*answer["refused"])

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._child.join()

    def serve(self, prompt: Sequence[int], params: Message) -> Message:
        """Serve one prompt and return its result."""
        return self._asked(prompt, params, False)

    def kill_while_storing(self, prompt: Sequence[int]) -> int:
        """Kill the process while it stores the blocks of a prompt; returns chunks on their way."""
        storing = int(self._asked(prompt, {"max_tokens": 1}, True).get("storing", 0))
        self._child.kill()
        self._child.join()
        return storing

    def _asked(self, *message: object) -> Message:
        with contextlib.suppress(OSError):  # _received says that it ended
            self._pipe.send(message)
        return self._received()

    def _received(self) -> Message:
        try:
            answer: Message = self._pipe.recv()
        except (EOFError, OSError):
            said = Path(self._log_name).read_text().splitlines()[-1:]
            text = f"an engine process ended: {' '.join(said)} (see {self._log_name})"
            raise DemoError(text) from None
        return answer


def _serve_all(pipe: Connection, settings: Message, threads: int, log_name: str) -> None:
    """Serve until the parent closes the pipe: the child's side."""
    log = os.open(log_name, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(log, fd)
    torch.set_num_threads(threads)
    try:
        engine = Engine(settings)
    except ConfigError as error:
        pipe.send({"refused": (error.field, str(error.value), error.remedy)})
        return
    with engine:
        # The first pass through a process pays for thread pools and memory; it is not measured.
        engine.generate([[1] * 300])
        pipe.send({})
        while True:
            if not pipe.poll(IDLE_S):
                engine.step()
                continue
            try:
                message = pipe.recv()
            except EOFError:
                return
            _serve(engine, pipe, *message)


def _serve(
    engine: Engine, pipe: Connection, prompt: Sequence[int], params: Message, announce: bool
) -> None:
    """Serve one prompt; with ``announce``, say first when its blocks begin to be stored."""
    engine.add_request(prompt, SamplingParams(**params))
    while True:
        results = engine.step()
        if announce and (storing := engine.connector.stats()["host_chunks_busy"]):
            pipe.send({"storing": storing})
            announce = False
        if results:
            computed = results[0].computed_prompt_tokens
            pipe.send({**asdict(results[0]), "computed_prompt_tokens": computed})
            return
