"""KV cache groups of different widths: host memory holds chunks of several sizes."""

import json
import shutil

import pytest

from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(1800)

LENGTH = 1000


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_groups_of_different_widths_share_host_memory(
    start, models, prompts, weigh, tmp_path, ranks
):
    """Three layers have windows, two full attention: vLLM makes groups of 2, 1 and 2 layers."""
    folder = tmp_path / "uneven"
    shutil.copytree(models("sliding"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 5
    config["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    weigh(folder)
    cpu_bytes = (4 << 20) // ranks  # of each rank, which has a part of every chunk
    extra = {
        "cpu_bytes": cpu_bytes,
        "backends": [{"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}],
        "lookup_timeout_s": 30.0,  # until the folder is listed, however long it takes
    }
    options = {"model": str(folder), "ranks": ranks}
    asked = prompts(4, LENGTH)
    plain = start(**options)
    told = plain.generate(asked)["tokens"]
    plain.kill()
    assert len({tuple(tokens) for tokens in told}) == 4
    engine = start(extra, **options)
    for _ in range(2):
        for prompt, right in zip(asked, told, strict=True):
            assert engine.generate([prompt])["tokens"] == [right]
        engine.ask("quiet")
        assert engine.ask("reset")
    sizes = {chunk.allocated_bytes for chunk in stored_in(tmp_path / "kv")}
    assert len(sizes) == 2, "chunks of two sizes"
    # Narrow chunks take half a slot: more chunks than slots of the widest are in host memory.
    widest = max(sizes)
    assert engine.ask("quiet")["vllm:kvoffload_host_chunks"] > cpu_bytes // (widest - 4096)
    engine.kill()
    again = start(extra, **options)
    for prompt, right in zip(asked, told, strict=True):
        answer = again.generate([prompt])
        assert answer["tokens"] == [right]
        assert answer["cached"][0] >= 900
    again.kill()
