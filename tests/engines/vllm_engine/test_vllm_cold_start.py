"""A real vLLM says why its tier is cold, and its page names the namespace by the same digits."""

import re
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

pytestmark = pytest.mark.timeout(900)

LINE = re.compile(
    r"disk: namespace (\w{16}) has no chunks; about .* of '(.*)' are in namespace (\w{16}), "
    r"which differs in (.*); kvoffload inspect"
)


def test_a_cold_start_names_the_fact_that_changed(start, prompts, tmp_path):
    tier = {"type": "disk", "root": str(tmp_path / "root"), "capacity": "64MiB"}
    named = []
    for size in (4, 2):
        settings = {
            "cpu_bytes": 40 * 65536,
            "backends": [tier],
            "blocks_per_chunk": size,
        }
        engine = start(settings)
        engine.generate(prompts(1, 1000))
        page, until_s = {}, time.monotonic() + 60
        while not any("namespace_info" in name for name in page):
            assert time.monotonic() < until_s
            page = engine.ask("counted")
        named += [name.split(" ")[1] for name in page if "namespace_info" in name]
        engine.close()
    (found,) = LINE.findall(engine.log_file.read_text())
    ours, model, theirs, differing = found
    assert [theirs, ours] == named
    assert model
    assert "blocks_per_chunk: 4 -> 2" in differing
