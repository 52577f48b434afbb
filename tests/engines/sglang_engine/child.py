"""A SGLang engine in a process group of its own, driven by lines of JSON: tests start and kill it.

See :mod:`tests.support.engine_process`.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from typing import Any


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    if "sglang.srt.managers.scheduler" in sys.modules:  # a fork: its processes are forks as well
        multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))

    def generate(
        prompts: list[list[int]], max_tokens: int = 8, adapters: list[str | None] | None = None
    ) -> dict[str, Any]:
        """Run prompts together; tell where the tokens of each prompt came from."""
        started = time.monotonic()
        wanted = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=wanted, lora_path=adapters)
        details = [out["meta_info"].get("cached_tokens_details") or {} for out in outputs]
        return {
            "tokens": [out["output_ids"] for out in outputs],
            "cached": [out["meta_info"]["cached_tokens"] for out in outputs],
            "storage": [each.get("storage", 0) for each in details],
            "time_s": time.monotonic() - started,
            "latency_s": [out["meta_info"]["e2e_latency"] for out in outputs],
        }

    def rounds(prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        """Run prompts together several times; each time they find empty caches of the engine."""
        answers = []
        for _ in range(count):
            while not flush():  # not while it still backs up
                time.sleep(0.05)
            answers.append(generate(prompts))
        return answers

    def events() -> dict[str, float]:
        """Return the counters of our storage, as SGLang's metrics endpoint would show them."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        found: Counter[str] = Counter()
        for metric in registry.collect():
            if metric.name == "sglang:kvoffload_events":
                for sample in metric.samples:
                    found[sample.labels["event"]] += sample.value
        return dict(found)

    def flush() -> bool:
        """Empty the caches of the device and of the host; storage keeps what it has."""
        done = engine.flush_cache()
        return bool(getattr(done, "success", done))

    def storage(action: str, **arguments: Any) -> bool:
        """Attach, detach or clear the storage while the engine serves."""
        call = getattr(engine.tokenizer_manager, f"{action}_hicache_storage")
        return bool(engine.loop.run_until_complete(call(**arguments)).success)

    def update(path: str) -> bool:
        """Replace the weights of the running engine; it empties its own caches then."""
        return bool(engine.update_weights_from_disk(path)[0])

    def adapter(name: str, path: str, again: bool = False) -> bool:
        """Load an adapter, in the place of an earlier one of this name."""
        if again:
            engine.unload_lora_adapter(name)
        return bool(engine.load_lora_adapter(name, path).success)

    verbs = {
        "generate": generate,
        "rounds": rounds,
        "events": events,
        "flush": flush,
        "storage": storage,
        "update": update,
        "adapter": adapter,
    }
    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer(verbs[asked.pop("do")](**asked))
        except Exception as error:
            answer({"error": repr(error)})
    engine.shutdown()


def answer(value: Any) -> None:
    os.write(int(os.environ["ANSWERS_FD"]), json.dumps({"ok": value}).encode() + b"\n")


if __name__ == "__main__":
    main()
