"""vLLM's own tiering with its file tier on a CPU, to compare with."""

import json
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]

HERE = Path(__file__).parent


def tiering(tier, **more):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "peer",
            "cpu_bytes_to_use": 70 * 65536,
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
            **more,
        },
    }


def told_alone(engine, prompts):
    answers = []
    for prompt in prompts(6, 1000):
        answers += engine.generate([prompt])["tokens"]
        engine.generate([[3, 4, 5]], 8)
    return answers


def wait_until_written(root, calm_s=2.0, limit_s=120):
    """Wait until files are neither added nor renamed any more."""
    started = since = time.monotonic()
    seen = None
    while (now := time.monotonic()) - since < calm_s and now - started < limit_s:
        files = sorted(root.rglob("*"))
        if files != seen:
            seen, since = files, now
        time.sleep(0.1)


def test_the_same_damage_under_vllms_own_file_tier_for_the_table(
    start, prompts, tmp_path, record_property
):
    """Nothing is asserted of vLLM: its output goes into docs/benchmarks/vllm.md by hand."""
    outcomes = {}
    for fault in ("flipped", "swapped", "transfer failed"):
        root = tmp_path / fault.replace(" ", "-")
        tier = {"type": "fs", "root_dir": str(root)}
        more = {"fail_after": 9} if fault == "transfer failed" else {}
        engine = start(
            kv_transfer_config=tiering(tier, **more), env={"PYTHONPATH": str(HERE)}, ready=False
        )
        outcomes[fault] = outcome(engine, prompts, root, fault)
        engine.kill()
    print("vLLM's own tiering:", json.dumps(outcomes, indent=1))
    record_property("vllm_own_tiering", outcomes)


def outcome(engine, prompts, root, fault):
    started = engine.answer()
    if "ready" not in started:
        return f"did not start: {engine.log[-500:]}"
    try:
        told = told_alone(engine, prompts)
    except (AssertionError, BrokenPipeError):
        return "engine ended while prompts were stored"
    wait_until_written(root)
    files = sorted(
        file for file in root.rglob("*") if file.is_file() and file.stat().st_size > 9999
    )
    if fault == "flipped":
        for file in files[::3]:
            data = bytearray(file.read_bytes())
            for at in range(0, len(data), 64):
                data[at] ^= 64
            file.write_bytes(data)
    elif fault == "swapped":
        for one, other in zip(files[0:60:2], files[1:60:2], strict=False):
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)
    same = cached = 0
    for i in range(6):
        try:
            engine.ask("reset")
            answer = engine.generate(prompts(6, 1000)[i : i + 1])
        except (AssertionError, BrokenPipeError):
            return f"engine ended at request {i + 1}"
        same += answer["tokens"] == told[i : i + 1]
        cached += answer["cached"][0]
    return f"{same} of 6 outputs the same, {cached} tokens loaded, {len(files)} files"
