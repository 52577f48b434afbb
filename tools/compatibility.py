"""Write the page of what was seen to work with which vLLM, from the outcomes of the tests.

``python tools/compatibility.py`` writes ``docs/reference/compatibility.md`` from ``outcomes.json``
in the folder of the tests, which a run of ``make test-vllm`` with ``OUTCOMES=1`` writes. With
``--check`` it changes nothing, and exits with 1 if the page differs.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "engines" / "vllm_engine"
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
COLUMNS = ("0.32.0 V1", "0.32.0 V2", "0.33.0 V1", "0.33.0 V2")
EQUAL = "test_vllm_outputs.py::test_outputs_are_those_of_vllm_alone"

ROWS: dict[str, tuple[str, ...]] = {
    "full attention: outputs of vLLM alone": (f"{EQUAL}[full attention]",),
    "sliding windows: outputs of vLLM alone": (f"{EQUAL}[sliding windows]",),
    "local attention in chunks (Llama 4): outputs of vLLM alone": (f"{EQUAL}[local attention]",),
    "layers with states (LFM2): outputs of vLLM alone": (f"{EQUAL}[states]",),
    "MLA: outputs of vLLM alone": (f"{EQUAL}[MLA]",),
    "MLA, tensor parallel 2: outputs of vLLM alone": (
        f"{EQUAL}[MLA on two ranks]",
        "test_vllm_identity.py::test_two_ranks_with_the_same_bytes",
    ),
    "chunked prefill: outputs of vLLM alone": (f"{EQUAL}[chunked prefill",),
    "async scheduling: outputs of vLLM alone": (f"{EQUAL}[async scheduling]",),
    "speculative decoding, n-grams: outputs of vLLM alone": (f"{EQUAL}[speculative decoding]",),
    "FP8 KV cache: outputs of vLLM alone": (f"{EQUAL}[8 bits a value]",),
    "preemption: outputs of vLLM alone": (f"{EQUAL}[preemption]", "test_vllm_soak.py"),
    "other processors, images, adapters, weights: nothing is taken for another": (
        "test_vllm_meaning.py",
    ),
    "streaming sessions: what they store": ("test_vllm_sessions.py",),
    "an outer producer: preempted requests that end": (
        "test_vllm_roles.py::test_a_request_that_ends",
    ),
    "random load: outputs of vLLM alone, nothing left": ("test_vllm_chaos.py",),
    "LoRA: outputs of vLLM alone": (f"{EQUAL}[LoRA]",),
    "images: outputs of vLLM alone": (f"{EQUAL}[images]",),
    "host memory, disk, restart, second instance": ("test_vllm_tiers.py",),
    "disk alone, no cache in host memory": ("test_vllm_staging.py",),
    "Redis: sharing, outages": ("test_vllm_redis.py",),
    "faults of the disk tier and of copies": ("test_vllm_faults.py",),
    "the I/O process dies": ("test_vllm_io_process.py",),
    "a server of the host: shared, and deaths": ("test_vllm_host_server.py",),
    "tensor parallel 2: restart, a chunk lost on one rank": (
        "test_vllm_presence.py",
        "test_vllm_identity.py::test_two_ranks",
    ),
    "blocks zeroed by Model Runner V2": ("test_vllm_zeroed.py",),
    "experts of tokens, returned: refused or equal": ("test_vllm_experts.py",),
    "cache_salt, LoRA, events": ("test_vllm_identity.py::test_salts",),
    "several blocks a chunk, windows, images, MLA": (
        "test_vllm_models.py",
        "test_vllm_chunk_size.py::test_an_engine",
    ),
    "groups of different widths": ("test_vllm_sizes.py",),
    "a slow tier: declined, patient, stalled": ("test_vllm_flow.py",),
    "queued requests: chunks kept, and read early": ("test_vllm_queue.py",),
    "metrics on vLLM's page": ("test_vllm_metrics.py::test_a_real_engine",),
    "sleep and wake": ("test_vllm_sleep.py",),
    "MultiConnector": ("test_vllm_multi.py",),
    "hints of requests": ("test_vllm_hints.py",),
    "an operator looks into the tiers and empties them": ("test_vllm_operators.py",),
    "the HTTP server: log, wrong settings": (
        "test_vllm_server.py",
        "test_vllm_examples.py::test_the_script_serves",
        "test_vllm_identity.py::test_a_misspelt",
    ),
    "command lines of the examples: vLLM's own parser": (
        "test_vllm_examples.py::test_the_manifest",
        "test_vllm_examples.py::test_the_compose_file",
        "test_vllm_examples.py::test_the_script_that",
    ),
    "events for NVIDIA Dynamo's indexer": ("test_vllm_router.py::test_dynamos",),
    "vLLM's own tests of its offloading connector": ("test_vllm_own_suite.py",),
}
"""What is shown, and the beginnings of the names of the tests that show it."""

HEAD = """\
<!-- Written by tools/compatibility.py from the outcomes of the tests: run them, then it. -->
# What was tested with which vLLM

Each cell states what the tests of its row did when they last ran: the outcome, and the day. A real
vLLM ran on a CPU with a tiny model. V1 and V2 are vLLM's model runners; V2 ran on Triton's
interpreter. "Not run": V2 alone zeroes blocks, and vLLM's own tests have no model runner. No row
was run on a GPU. No test runs pipeline, context or data parallelism, NIXL, or a Mamba model.

With V2 torch's compiler was off, and masks of Triton's interpreter were made truth values. Without
that, tensor parallelism and n-grams ended in the interpreter, in vLLM alone.

LFM2's requests ran one at a time. On a CPU, outputs of vLLM alone differ with the requests that are
computed together. Other tiny hybrids did not run on a CPU with vLLM 0.32 and V1 alone:

| architecture | what vLLM ended with |
|---|---|
| Granite 4, Falcon-H1, Nemotron-H | `IndexError` in `mamba_mixer2.py`, at the states of chunks |
| Jamba | `_C` has no attribute `selective_scan_fwd` |
| OLMo Hybrid | module `triton` has no attribute `set_allocator` |
| Qwen3-Next, in 32 bits | `CPU GDN attention requires BF16` |

0.33 was its Python files over the compiled parts of 0.32, because 0.33 is published for CUDA only.
"Outputs of vLLM alone": outputs were equal with and without the connector, computed and loaded.
They differed when loads brought back other chunks on purpose.

`make compatibility` runs all tests, and writes this page.

"""


def main() -> int:
    """Write the page, or compare it."""
    text = page(json.loads((TESTS / "outcomes.json").read_text()))
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print("docs/reference/compatibility.md differs: run python tools/compatibility.py")
        return 1
    return 0


def page(outcomes: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page."""
    lines = [
        f"| | {' | '.join(f'vLLM {column}' for column in COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for title, tests in ROWS.items():
        known = [seen for test, seen in sorted(outcomes.items()) if test.startswith(tests)]
        cells = [cell([seen[column] for seen in known if column in seen]) for column in COLUMNS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def cell(seen: list[list[str]]) -> str:
    """Say how many tests passed, when, and what did not."""
    counts = {name: sum(outcome == name for outcome, _ in seen) for name in ("failed", "skipped")}
    passed = len(seen) - sum(counts.values())
    if not passed and not counts["failed"]:
        return "skipped" if seen else "not run"
    days = sorted(day for _, day in seen)
    told = [f"{passed} passed", *(f"{count} {name}" for name, count in counts.items() if count)]
    return f"{', '.join(told)}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


if __name__ == "__main__":
    sys.exit(main())
