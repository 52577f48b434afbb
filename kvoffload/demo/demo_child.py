"""An engine in a process of its own, for the demo: settings and prompts in, results out, as JSON.

One line on stdin is one message; the first holds the engine's settings. Between messages the engine
keeps stepping, as a server's loop does, so that what it stores goes on down to the disk.
"""

import json
import queue
import sys
import threading
from typing import Any

import torch

from kvoffload.demo.engine import Engine
from kvoffload.demo.request import RequestResult
from kvoffload.demo.sampling import SamplingParams
from kvoffload.errors import ConfigError

IDLE_S = 0.002


def main() -> None:
    """Serve until stdin ends."""
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
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
        while (message := _next(messages, engine)) is not None:
            _serve(engine, message)


def _read(messages: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        messages.put(json.loads(line))
    messages.put(None)


def _next(
    messages: "queue.SimpleQueue[dict[str, Any] | None]", engine: Engine
) -> dict[str, Any] | None:
    while True:
        try:
            return messages.get(timeout=IDLE_S)
        except queue.Empty:
            engine.step()


def _serve(engine: Engine, message: dict[str, Any]) -> None:
    """Serve one prompt; with ``announce``, say first when its blocks begin to be stored."""
    engine.add_request(message["prompt"], SamplingParams(**message["params"]))
    announce = message.get("announce", False)
    while True:
        results = engine.step()
        if announce and (storing := _chunks_on_their_way(engine)):
            _say(storing=storing)
            announce = False
        if results:
            _say(**_plain(results[0]))
            return


def _chunks_on_their_way(engine: Engine) -> int:
    return int(engine.connector.stats()["host"]["busy_chunks"])


def _plain(result: RequestResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "token_ids": list(result.token_ids),
        "ttft_s": result.ttft_s,
        "latency_s": result.latency_s,
        "cached_tokens": dict(result.cached_tokens),
        "computed_prompt_tokens": result.computed_prompt_tokens,
        "undelivered_tokens": result.undelivered_tokens,
    }


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
