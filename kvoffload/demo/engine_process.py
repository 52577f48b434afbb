"""An engine in a process of its own, which the demo can kill: settings and prompts in, results out.

One line of JSON is one message; the first on the child's stdin holds the engine's settings. Between
messages the engine keeps stepping, as a server's loop does, so that what it stores goes on down to
the disk.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from kvoffload.demo.mini_engine import Engine
from kvoffload.demo.sampling import SamplingParams
from kvoffload.errors import ConfigError, KVOffloadError

IDLE_S = 0.002
Message = dict[str, Any]


class DemoError(KVOffloadError):
    """An engine process ended that should not have."""


class EngineProcess:
    """The parent's side.

    Raises:
        ConfigError: the engine refuses its settings.
        DemoError: the process ended unasked; so do all methods.
    """

    def __init__(self, settings: Message, threads: int, log: IO[str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": module_path()},
        )
        self._log_name = log.name
        self._send({"engine": settings, "threads": threads})
        self._receive()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate()

    def serve(self, prompt: Sequence[int], params: Message) -> Message:
        """Serve one prompt and return its result."""
        self._send({"prompt": prompt, "params": params})
        return self._receive()

    def kill_while_storing(self, prompt: Sequence[int]) -> int:
        """Kill the process while it stores the blocks of a prompt; returns chunks on their way."""
        self._send({"prompt": prompt, "params": {"max_tokens": 1}, "announce": True})
        storing = int(self._receive().get("storing", 0))
        self._child.kill()
        self._child.wait()
        return storing

    def _send(self, message: Message) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _receive then says that it ended
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()

    def _receive(self) -> Message:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            said = Path(self._log_name).read_text().splitlines()[-1:]
            raise DemoError(f"an engine process ended: {' '.join(said)} (see {self._log_name})")
        answer: Message = json.loads(line)
        if "refused" in answer:
            raise ConfigError(*answer["refused"])
        return answer


def module_path() -> str:
    """Return a ``PYTHONPATH`` by which a child finds this package."""
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


def main() -> None:
    """Serve until stdin ends: the child's side."""
    messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    start = messages.get()
    if start is None:
        return
    torch.set_num_threads(start["threads"])
    try:
        engine = Engine(start["engine"])
    except ConfigError as error:
        _say(refused=[error.field, str(error.value), error.remedy])
        return
    with engine:
        # The first pass through a process pays for thread pools and memory; it is not measured.
        engine.generate([[1] * 300])
        _say(ready=True)
        while True:
            try:
                message = messages.get(timeout=IDLE_S)
            except queue.Empty:
                engine.step()
                continue
            if message is None:
                return
            _serve(engine, message)


def _read(messages: "queue.SimpleQueue[Message | None]") -> None:
    for line in sys.stdin:
        messages.put(json.loads(line))
    messages.put(None)


def _serve(engine: Engine, message: Message) -> None:
    """Serve one prompt; with ``announce``, say first when its blocks begin to be stored."""
    engine.add_request(message["prompt"], SamplingParams(**message["params"]))
    announce = message.get("announce", False)
    while True:
        results = engine.step()
        if announce and (storing := engine.connector.stats()["host_chunks_busy"]):
            _say(storing=storing)
            announce = False
        if results:
            computed = results[0].computed_prompt_tokens
            _say(**asdict(results[0]), computed_prompt_tokens=computed)
            return


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
