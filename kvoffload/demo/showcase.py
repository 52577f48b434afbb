"""The demo: conversations over long texts, served again from memory and disk, after kills too.

The demo has four passes over the same conversations. An engine serves them for the first time, and
then goes on with them. The engine is killed while it stores; a new process on the same folder goes
on. At last two engines share a server of the host: one computes the conversations and is killed,
and the other one goes on with them. An engine without offloading gets the same prompts. Run it
with ``kvoffload demo``.
"""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.control import is_supported
from kvoffload.demo.conversations import QUESTIONS, Conversation, conversations
from kvoffload.demo.demo_report import machine, problems, summarize
from kvoffload.demo.engine_config import ModelConfig
from kvoffload.demo.engine_process import EngineProcess
from kvoffload.demo.random_weights import expected_shapes
from kvoffload.demo.sampling import encode
from kvoffload.demo.shared_server import SharedServer

CONVERSATIONS_ON_DEVICE = 2.5
"""How many conversations the KV cache of the engine holds; it serves several times as many."""

Results = list[dict[str, Any]]
Progress = Callable[[str, int], None]
"""Called with what is going on and how many requests have been served since the last call."""


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs."""

    out: Path
    quick: bool = False
    device: str = "cpu"
    threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) - 1))
    """Compute threads of the model; one core is left for copies and I/O."""

    @property
    def num_conversations(self) -> int:
        return 5 if self.quick else 6

    @property
    def prompt_tokens(self) -> int:
        return 400 if self.quick else 2000

    @property
    def answer_tokens(self) -> int:
        return 4 if self.quick else 16

    def model(self) -> ModelConfig:
        """Return the shape of the model that will be served."""
        if self.quick:
            return ModelConfig(
                hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32,
                intermediate_size=256,
            )  # fmt: skip
        return ModelConfig()


def run(options: DemoOptions, progress: Progress = lambda what, done: None) -> dict[str, Any]:
    """Run everything and return the report; writes only below ``options.out``, but for a socket.

    The server of a host needs Linux: elsewhere there is no fourth pass.

    Raises:
        ConfigError: a device or a folder that cannot be used.
        DemoError: an engine process died unasked, or the server does not start.
    """
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    shape = options.model()
    *talks, victim = conversations(options.num_conversations + 1, options.prompt_tokens)
    folder = tempfile.mkdtemp(prefix="kv-cache-", dir=options.out)
    settings = _engine_settings(options, shape, talks)
    offload = _offload_settings(settings, len(talks), folder)
    (options.out / "engine.log").unlink(missing_ok=True)
    try:
        with (options.out / "engine.log").open("a") as log:  # of all processes

            def engine(settings: dict[str, Any]) -> EngineProcess:
                return EngineProcess(settings, options.threads, log)

            with engine(settings) as without:
                demo = _Demo(talks, options.answer_tokens, without, progress)
                with engine({**settings, "offload": offload}) as process:
                    cold = demo.turn(process, 0, "1 cold")
                    host = demo.turn(process, 1, "2 from host memory")
                    progress("killing the engine while it stores", 0)
                    storing = [process.kill_while_storing(victim.prompt([]))]
                with engine({**settings, "offload": offload}) as process:
                    disk = demo.turn(process, 2, "3 from disk, in a new process")
                results = {"cold": cold, "host": host, "disk": disk}
                if is_supported():
                    with SharedServer(offload["cpu_bytes"], log) as server:
                        offload = {**offload, "backends": [], "serve": server.path}
                        shared = {**settings, "offload": offload}
                        with engine(shared) as first, engine(shared) as second:
                            demo.repeat(first, 2, "computing for the server of the host")
                            progress("killing that engine while it stores", 0)
                            storing.append(first.kill_while_storing(victim.prompt([])))
                            what = "4 from the server, by its other engine"
                            results["server"] = demo.turn(second, 3, what)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    passes = [summarize(name, *both) for name, both in results.items()]
    return {
        "demo": "kvoffload",
        "quick": options.quick,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "threads": options.threads,
        "device": options.device,
        "model": _model_name(shape),
        "kv_bytes_per_token": _kv_bytes_per_token(shape),
        "engine": {k: v for k, v in settings.items() if k != "model"},
        "texts": [talk.title for talk in talks],
        "killed_with_chunks_on_their_way": storing,
        "passes": passes,
        "problems": problems(passes),
        "seconds": time.monotonic() - began,
    }


class _Demo:
    """The conversations' course, each turn also asked of an engine without offloading.

    The two take turns, prompt by prompt, so that other work on the machine hits both alike. The
    answers of the one without become the history of the next turn's prompts for both.
    """

    def __init__(
        self,
        talks: Sequence[Conversation],
        answer_tokens: int,
        without: EngineProcess,
        progress: Progress,
    ) -> None:
        self._talks = talks
        self._answer_tokens = answer_tokens
        self._without = without
        self._progress = progress
        self._answers: list[list[list[int]]] = [[] for _ in talks]

    def turn(self, process: EngineProcess, turn: int, what: str) -> tuple[Results, Results]:
        """Ask question ``turn`` in every conversation; returns results with and without."""
        ours: Results = []
        theirs: Results = []
        self._progress(what, 0)
        for number, (prompt, params) in enumerate(self._requests(turn)):
            pairs = [(process, ours), (self._without, theirs)]
            for engine, results in pairs if number % 2 else reversed(pairs):
                results.append(engine.serve(prompt, params))
                self._progress(what, 1)
            self._answers[number].append(theirs[-1]["token_ids"])
        return ours, theirs

    def repeat(self, process: EngineProcess, turn: int, what: str) -> None:
        """Let this engine compute the prompts of question ``turn``, whose answers are known."""
        self._progress(what, 0)
        for prompt, params in self._requests(turn):
            process.serve(prompt, {**params, "max_tokens": 1})
            self._progress(what, 1)

    def _requests(self, turn: int) -> list[tuple[list[int], dict[str, Any]]]:
        """Return a prompt of each conversation, and how its answer is sampled."""
        params = {"max_tokens": self._answer_tokens, "ignore_eos": True}
        return [
            # Every other conversation is greedy.
            (talk.prompt(answers[:turn]), {**params, "temperature": number % 2, "seed": number})
            for number, (talk, answers) in enumerate(zip(self._talks, self._answers, strict=True))
        ]


def num_requests(options: DemoOptions) -> int:
    """Requests of the whole demo, for a progress bar."""
    # Of each pass, with and without offloading; and those that are computed for the server.
    each = 2 * len(QUESTIONS) + 1 if is_supported() else 2 * (len(QUESTIONS) - 1)
    return each * options.num_conversations


def _engine_settings(
    options: DemoOptions, shape: ModelConfig, talks: Sequence[Conversation]
) -> dict[str, Any]:
    """Return settings with a KV cache on the device for only a few of the conversations."""
    block_size = 16
    longest = max(len(talk.opening) for talk in talks)
    longest += sum(map(len, map(encode, QUESTIONS))) + len(QUESTIONS) * options.answer_tokens
    max_model_len = -(-longest // block_size) * block_size
    return {
        "model": msgspec.to_builtins(shape),
        "device": options.device,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": 512,
        "kv_cache_bytes": int(CONVERSATIONS_ON_DEVICE * max_model_len) * _kv_bytes_per_token(shape),
    }


def _kv_bytes_per_token(shape: ModelConfig) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * 4  # float32


def _offload_settings(
    settings: dict[str, Any], num_conversations: int, folder: str
) -> dict[str, Any]:
    """Return settings with host memory for all conversations, and a disk below it."""
    per_conversation = settings["kv_cache_bytes"] / CONVERSATIONS_ON_DEVICE
    return {
        "cpu_bytes": int(per_conversation * (num_conversations + 2)),
        "blocks_per_chunk": 4,
        "backends": [
            {
                "type": "disk",
                "root": folder,
                "capacity": int(per_conversation * 3 * num_conversations),
            }
        ],
    }


def _model_name(shape: ModelConfig) -> str:
    count = sum(math.prod(dimensions) for dimensions in expected_shapes(shape).values())
    return f"Llama architecture, {count / 1e6:.1f} M random weights, float32"
