"""A SGLang engine in a process group of its own, driven by lines of JSON: tests start and kill it.

See :mod:`tests.support.engine_process`.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))

    def generate(prompts: list[list[int]], max_tokens: int = 8) -> dict[str, Any]:
        """Run prompts together; tell where the tokens of each prompt came from."""
        started = time.monotonic()
        wanted = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=wanted)
        details = [out["meta_info"].get("cached_tokens_details") or {} for out in outputs]
        return {
            "tokens": [out["output_ids"] for out in outputs],
            "cached": [out["meta_info"]["cached_tokens"] for out in outputs],
            "storage": [each.get("storage", 0) for each in details],
            "time_s": time.monotonic() - started,
        }

    def flush() -> bool:
        """Empty the caches of the device and of the host; storage keeps what it has."""
        done = engine.flush_cache()
        return bool(getattr(done, "success", done))

    def storage(action: str, **arguments: Any) -> bool:
        """Attach, detach or clear the storage while the engine serves."""
        call = getattr(engine.tokenizer_manager, f"{action}_hicache_storage")
        return bool(engine.loop.run_until_complete(call(**arguments)).success)

    verbs = {"generate": generate, "flush": flush, "storage": storage}
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
