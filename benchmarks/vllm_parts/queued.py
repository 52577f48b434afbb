"""Ten prompts that queue, with chunks on a disk alone: time to the first token of the tenth; CPU.

    python -m benchmarks.vllm_parts.queued          about 8 minutes on two idle cores
    python -m benchmarks.vllm_parts.queued 6144     with wider layers: each prompt computes longer

Reads of a fast disk take cores from the model. A limit of the kernel (``blkio.throttle``, or
``IOReadBandwidthMax`` of ``systemd-run``) makes a slow disk; layers are wider then. It may hold a
read for longer than ``load_timeout_s``. The prompt is then computed, and the medians bear it.

One request runs at a time (``max_num_seqs`` 1). GPU memory has room for one prompt, and host memory
for seven. Before each round host memory and the page cache are emptied. One engine is compared with
itself: in every other round the queue has no share of host memory, as with ``waiting_share`` 0.

Early reads hide a load behind what runs before it. Let a load from disk take ``l``, one from host
memory ``h``, and the tokens of a request ``c``. Without early reads ten requests take
``10 (l + c)``; with them no less than ``l + 9 max(l, h + c)``. So the answers have several lengths
here: 0.8 is possible where ``h`` is small, and neither of ``l`` and ``c`` is four times the other.
``tests/offload/test_queue_times.py`` holds the manager to that, with times that are fixed.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, out_of_page_cache, report, row
from benchmarks.vllm_parts.engine import Engine, make_model, prompt

PROMPTS, BLOCK = 10, 32
TOKENS = 46 * BLOCK + 1
SHAPE = {
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
"""48 KB of KV a token, as of a model of a few billion parameters. A prompt takes longer to compute
than to load, or it would not be loaded."""
TOKEN_BYTES = 12 * 2 * 16 * 64 * 2
HOST = 7 * TOKENS * TOKEN_BYTES
ANSWERS = (1, 4, 8, 16)
ROUNDS = 6
GOAL = 0.8
CALM_S = 1.5


def run(intermediate_size: int = SHAPE["intermediate_size"]) -> dict[str, Any]:
    """Measure all lengths of answers with a model of layers so wide."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        disk = {"type": "disk", "root": str(folder / "kv"), "min_free": 0}
        extra = {"cpu_bytes": HOST, "backends": [disk], "fixed_weights": True, "canary": False}
        options: dict[str, Any] = {
            "max_num_seqs": 1,
            "num_gpu_blocks_override": TOKENS // BLOCK + 8,
            "max_model_len": TOKENS + 2 * BLOCK,
        }
        shape = {**SHAPE, "intermediate_size": intermediate_size}
        rng = random.Random(1)
        prompts = [prompt(rng, TOKENS) for _ in range(PROMPTS)]
        with Engine(make_model(folder / "model", shape), extra, **options) as engine:
            for each in [*prompts, *[prompt(rng, 8)] * 3]:  # the connector stores in later steps
                engine.serve(each, 4, CALM_S)
            for length in ANSWERS:
                rows += _rows(engine, prompts, length, folder / "kv")
    return report("vllm_queued", rows)


def _rows(engine: Engine, prompts: list[list[int]], length: int, root: Path) -> list[Row]:
    tenth: dict[bool, list[float]] = {False: [], True: []}
    misses = 0
    for number in range(2 * ROUNDS):
        keeps = number % 4 in (1, 2)
        engine.ask("reset", connector=True)
        engine.serve(prompts[0][:8], 4, CALM_S)  # workers hear of it in a step
        out_of_page_cache(root)
        found = engine.ask("queue", prompts=prompts, max_tokens=length, keeps=keeps)
        misses += found["cached"][0] < TOKENS - 1
        if misses > ROUNDS // 3:
            raise RuntimeError(f"prompts were not found on the disk: {found['cached']}")
        tenth[keeps].append(found["first_s"][-1])
        time.sleep(CALM_S)
    ratio = statistics.median(
        early / late for early, late in zip(tenth[True], tenth[False], strict=True)
    )
    without = 1000 * statistics.median(tenth[False])
    case = f"answers of {length}: first token of the tenth, {without:.0f} ms without early reads"
    return [row(case, ratio, "times", GOAL, "goal")]


if __name__ == "__main__":
    print(json.dumps(run(*map(int, sys.argv[1:2])), indent=1))
