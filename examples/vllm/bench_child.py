"""One vLLM engine in a process, driven by lines of JSON; what ``kvoffload bench vllm`` measures.

    python bench_child.py '{"model": ..., ...}'     options of vLLM's LLM class

The orders, of which all but the first two need VLLM_ENABLE_V1_MULTIPROCESSING=0:

* ``serve``: serve a prompt and time its tokens.
* ``reset``: reset the prefix cache.
* ``lookup``: time the scheduler half's answer for a long prompt.
* ``switch``: switch the connector off and on again while no request runs.
* ``decode``: decode a prompt with the connector in some steps only.
* ``busy``: decode a prompt while further prompts arrive.
* ``queue``: serve prompts that arrive at once, with the connector's queue or without.
* ``our_cpu``: return the CPU time of our threads.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "@@answer "


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.request import Request

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

    def decode(prompt: list[int], max_tokens: int, pattern: list[bool]) -> dict[str, Any]:
        """Serve a prompt with the connector in only some of the steps after the first token.

        Returns the seconds of each of these steps. The connector must be present in a step that
        begins a block, or it would not hear of the block.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"b{next(numbers)}", {"prompt_token_ids": prompt}, params)
        engine.step()
        steps: list[float] = []
        is_in = True
        while engine.has_unfinished_requests():
            wanted = pattern[len(steps) % len(pattern)]
            if wanted is not is_in:
                switch(wanted)
                is_in = wanted
            started = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - started)
        if not is_in:
            switch(True)
        return {"steps": steps}

    def busy(prompt: list[int], max_tokens: int, arrivals: list[list[int]], every: int) -> Any:
        """Serve a prompt; another one arrives after each ``every`` steps and wants one token.

        Returns the seconds between the tokens of the first prompt, and the tokens of each request
        that were found in a cache.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        name = f"b{next(numbers)}"
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        waiting, steps, last = list(reversed(arrivals)), 0, 0.0
        times: list[float] = []
        found: dict[str, int] = {}
        while engine.has_unfinished_requests():
            if times and steps % every == 0 and waiting:
                arrived = {"prompt_token_ids": waiting.pop()}
                engine.add_request(f"b{next(numbers)}", arrived, one)
            steps += 1
            for out in engine.step():
                request = out.request_id.split("-", 1)[0]
                found[request] = out.num_cached_tokens
                if request == name:
                    now = time.perf_counter()
                    times.append(now - last)
                    last = now
        return {"times": times[1:], "found": found}

    def queue(prompts: list[list[int]], max_tokens: int, keeps: bool) -> dict[str, Any]:
        """Serve prompts that arrive at once.

        Returns the time of each one's first token, and how many of its tokens were found. Without
        ``keeps`` the queue has no share of host memory, as with ``waiting_share`` 0.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        half = engine.engine_core.engine_core.scheduler.connector.connector_scheduler
        claims = half.adapter.manager.waiting.claims
        share_bytes = claims.share_bytes
        claims.share_bytes = share_bytes if keeps else 0
        started = time.perf_counter()
        names = [f"b{next(numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        first_s: dict[str, float] = {}
        cached: dict[str, int] = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                first_s.setdefault(out.request_id, time.perf_counter() - started)
                cached[out.request_id] = out.num_cached_tokens or 0
        claims.share_bytes = share_bytes
        return {"first_s": sorted(first_s.values()), "cached": sorted(cached.values())}

    def reset(connector: bool = False) -> bool:
        return llm.reset_prefix_cache(reset_connector=connector)

    def lookup(chunks: int, rounds: int) -> dict[str, float]:
        """Time the scheduler half's call for a prompt of which every chunk is in host memory."""
        core = engine.engine_core.engine_core
        half = core.scheduler.connector.connector_scheduler
        size = half.config.kv_group_configs[0].tokens_per_chunk
        prompt, params = [1] * (chunks * size + 1), SamplingParams(max_tokens=1)
        request = Request("timed", prompt, params, None, block_hasher=core.request_block_hasher)
        half.on_new_request(request)
        half._req_status["timed"].update_offload_keys()
        keys = half._req_status["timed"].group_states[0].offload_keys
        manager = half.adapter.manager
        output = manager.prepare_store(keys)
        manager.complete_store(output.keys_to_store)
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            found, _ = half.get_num_new_matched_tokens(request, 0)
            times.append(time.perf_counter() - started)
            if found != chunks * size:
                raise RuntimeError(f"{found} tokens found")
        return {"median_s": statistics.median(times), "best_s": min(times)}

    def switch(on: bool) -> None:
        """Take the connector out of both its processes, as if there were none, or put it back."""
        core = engine.engine_core.engine_core
        set_aside.setdefault("connector", core.scheduler.connector)
        set_aside.setdefault("aggregator", core.model_executor.kv_output_aggregator)
        core.scheduler.connector = set_aside["connector"] if on else None
        core.model_executor.kv_output_aggregator = set_aside["aggregator"] if on else None
        workers(switch_worker, on)

    def our_cpu() -> float:
        """CPU seconds so far of the threads that kvoffload has started in the worker."""
        return float(workers(cpu_of_our_threads)[0])

    def workers(call: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the workers, below the engine.

        A call of the engine may change its weights, so all chunks would be forgotten.
        """
        return engine.engine_core.engine_core.model_executor.collective_rpc(call, args=args)

    set_aside: dict[str, Any] = {}
    calls: dict[str, Callable[..., Any]] = {
        "serve": serve,
        "decode": decode,
        "busy": busy,
        "queue": queue,
        "reset": reset,
        "lookup": lookup,
        "switch": switch,
        "our_cpu": our_cpu,
    }
    answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        answer(calls[order.pop("do")](**order))


def answer(value: Any) -> None:
    """Write in one call: lines of the engine's other processes would come in between."""
    os.write(1, f"{MARK}{json.dumps(value)}\n".encode())


def switch_worker(worker: Any, on: bool) -> None:
    """The worker's half of ``switch``."""
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    vars(state).setdefault("set_aside", state._KV_CONNECTOR_AGENT)
    state._KV_CONNECTOR_AGENT = vars(state)["set_aside"] if on else None


def cpu_of_our_threads(worker: Any) -> float:
    """The worker's half of ``our_cpu``."""
    import threading
    from pathlib import Path

    ours = [thread for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    files = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in ours]
    return sum(int(file.read_text().split()[0]) for file in files if file.exists()) / 1e9


if __name__ == "__main__":
    main()
