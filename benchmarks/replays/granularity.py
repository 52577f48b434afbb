"""Hit rate by the tokens of a chunk: what larger chunks lose, replayed on a trace.

    python -m benchmarks.replays.granularity mooncake_conversation.jsonl        about 10 minutes

A prompt is reused up to its last whole chunk. The trace names blocks of 512 tokens and the length
of each prompt. Tokens within a block are not known, so this takes them to be equal as follows:

* A prompt that goes on where an earlier one ended, within a block, has all tokens of that one.
* Other prompts that part within a block part at a token drawn evenly, but have nothing in common
  if they part in their first block.

Each store holds the same number of tokens, whatever the chunks. Rates are shares of all tokens of
all prompts.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, report, row
from kvoffload import registry
from kvoffload.replay.requests import RequestsBuilder
from kvoffload.replay.simulate import Level, infinite, replay_levels

BLOCK_TOKENS = 512
UNIT_TOKENS = 16
CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
STORE_TOKENS = (512_000, 5_120_000, 51_200_000)
POLICY = "handicap"
_UNITS = BLOCK_TOKENS // UNIT_TOKENS

Unit = tuple[int, int]
"""A block, and the number of 16 tokens in it; equal units have equal prefixes."""


def prompts_of(path: Path) -> Iterator[tuple[list[Unit], int]]:
    """Yield each prompt as its whole units, and its number of tokens."""
    draw = random.Random(0)
    first_of: dict[int | None, tuple[int, int]] = {}
    """Parent → the block that came after it first, and the units it had."""
    shared: dict[int, tuple[int, int]] = {}
    """Block → the block that has its first units as well, and how many."""
    for line in path.read_text().splitlines():
        asked = json.loads(line)
        blocks, tokens = asked["hash_ids"], asked["input_length"]
        units: list[Unit] = []
        parent: int | None = None
        for at, block in enumerate(blocks):
            count = min(_UNITS, (tokens - at * BLOCK_TOKENS) // UNIT_TOKENS)
            other, had = first_of.setdefault(parent, (block, count))
            if block not in shared:
                common = 0
                if block != other and parent is not None:
                    common = had if had < _UNITS else draw.randrange(_UNITS)
                shared[block] = other, common
            other, common = shared[block]
            units += ((other if i < common else block, i) for i in range(count))
            parent = block
        yield units, tokens


def run(path: Path) -> dict[str, Any]:
    """Replay the trace with chunks of each size."""
    prompts = list(prompts_of(path))
    asked = sum(tokens for _, tokens in prompts)
    rows: list[Row] = []
    finest: dict[str, float] = {}
    for chunk in CHUNK_TOKENS:
        every = chunk // UNIT_TOKENS
        built = RequestsBuilder()
        for units, _ in prompts:
            built.add(f"{block}.{i}" for block, i in units[every - 1 :: every])
        requests = built.build()
        hits = {"a store without a limit": infinite(requests).prefix}
        for tokens in STORE_TOKENS:
            count = tokens // chunk
            policy = registry.load(registry.POLICIES, POLICY)(count)
            store = Level("", count, policy)
            hits[f"a store of {tokens:,} tokens"] = replay_levels(requests, [store]).prefix
        for name, found in hits.items():
            rate = 100 * found * chunk / asked
            limit = finest.setdefault(name, rate)
            case = f"chunks of {chunk} tokens, {name}"
            rows.append(row(case, rate, "% of tokens", limit, f"chunks of {CHUNK_TOKENS[0]}"))
            print(case, round(rate, 2), file=sys.stderr, flush=True)
    return report("granularity", rows)


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1])), indent=1))
