"""A vLLM in another process, and small models with random weights for it."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
"""Of the checkout."""
CHILD = "examples/vllm/bench_child.py"
TINY_MODEL = "examples/vllm/tiny_model.py"
PEER = ROOT / "tests/engines/vllm_engine"
"""Has connectors to compare with: vLLM's own on a CPU (``peer``), and one that does nothing."""
MARK = "@@answer "
SHAPE = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The shape of the smallest model that people serve: 0.36 billion parameters without the
vocabulary, 12 KB of KV a token. Smaller models make steps of a few milliseconds."""


def ours(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config`` for our connector with these settings."""
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "kvoffload.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def theirs(num_bytes: int, **more: Any) -> dict[str, Any]:
    """Return the same for vLLM's own connector with so much host memory; torch copies there."""
    extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "peer", "secondary_tiers": []}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "cpu_bytes_to_use": num_bytes, **more},
    }


def idle() -> dict[str, Any]:
    """Return the same for a connector that does nothing."""
    return {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "sibling",
        "kv_role": "kv_both",
    }


class Engine:
    """A vLLM in another process.

    Its scheduler shares the process that is asked. The model computes in a worker process, as in a
    server, on all cores but one.

    Args:
        model: folder of the model.
        extra: our settings; None for no connector.
        transfer: vLLM's ``kv_transfer_config`` in the place of ours.
        more: further options of vLLM.
    """

    def __init__(
        self,
        model: str,
        extra: Mapping[str, Any] | None,
        transfer: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        options: dict[str, Any] = {
            "model": model,
            "load_format": "dummy",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 8192,
            "seed": 0,
            "distributed_executor_backend": "mp",
            **more,
        }
        if extra is not None:
            transfer = ours(extra)
        if transfer is not None:
            options["kv_transfer_config"] = transfer
        self.process = subprocess.Popen(
            [_python(), str(ROOT / CHILD), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "THP_MEM_ALLOC_ENABLE": "1",
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(PEER))),
            },
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send an order and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def serve(self, prompt: list[int], num_tokens: int, calm_s: float) -> list[float]:
        """Send a request; return its tokens' times in seconds, so long after its end."""
        times: list[float] = self.ask("serve", prompt=prompt, max_tokens=num_tokens)["times"]
        time.sleep(calm_s)
        return times

    def decode(
        self, prompt: list[int], num_tokens: int, pattern: Sequence[bool], calm_s: float
    ) -> list[float]:
        """Send a request; return the seconds of its steps after the first token.

        Args:
            prompt: of whole blocks.
            num_tokens: of the answer.
            pattern: in which steps the connector takes part, over and over; it must in each
                first step of a block.
            calm_s: so long after its end.
        """
        asked = {"prompt": prompt, "max_tokens": num_tokens, "pattern": pattern}
        steps: list[float] = self.ask("decode", **asked)["steps"]
        time.sleep(calm_s)
        return steps

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError("vLLM ended; is it installed? see docs/guides/vllm.md")


def _python() -> str:
    own = ROOT / ".venv-vllm/bin/python"
    return str(own) if own.exists() else sys.executable


def settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Our settings that are compared, by name."""
    disk = {"type": "disk", "root": str(folder / "kv"), "min_free": 0}
    host = {"cpu_bytes": "1GiB"}
    return {"host memory": host, "host memory and disk": {**host, "backends": [disk]}}


def make_model(folder: Path, shape: Mapping[str, int] | None = None) -> str:
    """Write a tiny model, or one of that shape, for random weights; return its folder."""
    command = [_python(), str(ROOT / TINY_MODEL), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **(shape or {})}))
    return str(folder)


def prompt(rng: random.Random, length: int) -> list[int]:
    """Return tokens that no one has seen."""
    return rng.choices(range(3, 512), k=length)
