"""One vLLM engine in a process, driven by lines of JSON; what ``kvoffload bench vllm`` measures.

    python bench_child.py '{"model": ..., ...}'     options of vLLM's LLM class

Orders: ``serve`` a prompt and time its tokens, ``reset`` the prefix cache, ``lookup`` how long the
scheduler half takes to answer for a long prompt (only with VLLM_ENABLE_V1_MULTIPROCESSING=0).
"""

import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

MARK = "@@answer "


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    engine = llm.llm_engine
    numbers = iter(range(1 << 30))

    def serve(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        engine.add_request(f"b{next(numbers)}", {"prompt_token_ids": prompt}, params)
        times: list[float] = []
        tokens: list[int] = []
        cached = 0
        while engine.has_unfinished_requests():
            for out in engine.step():
                new = len(out.outputs[0].token_ids) - len(tokens)
                times += [time.perf_counter() - started] * new
                tokens = list(out.outputs[0].token_ids)
                cached = out.num_cached_tokens or 0
        return {"times": times, "tokens": tokens, "cached": cached}

    def reset() -> bool:
        return llm.reset_prefix_cache()

    def lookup(chunks: int, rounds: int) -> dict[str, float]:
        """Time the scheduler half's call for a prompt of which every chunk is in host memory."""
        half = engine.engine_core.engine_core.scheduler.connector.connector_scheduler
        size = half.config.kv_group_configs[0].tokens_per_chunk
        request = SimpleNamespace(
            request_id="timed",
            num_tokens=chunks * size + 1,
            num_prompt_tokens=chunks * size + 1,
            block_hashes=[i.to_bytes(32, "big") for i in range(1, chunks + 1)],
            kv_transfer_params=None,
            kv_hints=None,
            skip_reading_prefix_cache=False,
        )
        half.on_new_request(request)
        half._req_status["timed"].update_offload_keys()
        keys = half._req_status["timed"].group_states[0].offload_keys
        ledger = half.adapter.ledger
        output = ledger.prepare_store(keys)
        ledger.complete_store(output.keys_to_store)
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            found, _ = half.get_num_new_matched_tokens(request, 0)
            times.append(time.perf_counter() - started)
            if found != chunks * size:
                raise RuntimeError(f"{found} tokens found")
        return {"median_s": statistics.median(times), "best_s": min(times)}

    calls = {"serve": serve, "reset": reset, "lookup": lookup}
    print(MARK + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(MARK + json.dumps(calls[order.pop("do")](**order)), flush=True)


if __name__ == "__main__":
    main()
