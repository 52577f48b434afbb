"""A vLLM engine in a process of its own, driven by lines of JSON: what the tests start and kill.

See :mod:`tests.support.engine_process`.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    is_fork = "vllm" in sys.modules
    from random_load import RandomLoad, trusted
    from streaming import run_session
    from vllm import LLM, SamplingParams, envs
    from vllm.lora.request import LoRARequest

    from kvoffload.connectors.vllm.engine_metrics import PERIOD_S
    from kvoffload.connectors.vllm.engine_weights import our_connectors
    from kvoffload.connectors.vllm.worker import COUNTERS_PERIOD_S

    if is_fork:  # its processes are forks as well, which vLLM asks for on GPUs alone
        envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    llm = LLM(**json.loads(sys.argv[1]))
    engine = llm.llm_engine
    ids = iter(range(1 << 30))

    def generate(
        prompts: list[list[int]],
        max_tokens: int | list[int] = 16,
        salts: list[str] | None = None,
        loras: list[list[Any] | None] | None = None,
        images: list[int | None] | None = None,
        uuids: list[str] | None = None,
        abort: dict[str, int] | None = None,
        hints: dict[str, Any] | None = None,
        wishes: dict[str, Any] | None = None,
        limit_s: float = 300.0,
    ) -> dict[str, Any]:
        """Run prompts together.

        ``images`` gives a prompt an image of noise, by its seed, ``uuids`` the name under which a
        client sends it; ``abort`` maps a prompt's place to
        the step it is aborted at; ``hints`` are all prompts' wishes of kvoffload, and ``wishes``
        those that vLLM names.
        """
        asked_for = {**(wishes or {}), **({"kvoffload": hints} if hints else {})}
        numbers: dict[str, int] = {}
        for i, prompt in enumerate(prompts):
            name = f"r{next(ids)}"
            numbers[name] = i
            asked: dict[str, Any] = {"prompt_token_ids": prompt}
            if salts and salts[i]:
                asked["cache_salt"] = salts[i]
            if images and images[i] is not None:
                asked["multi_modal_data"] = {"image": noise(images[i])}
            if uuids:
                asked["multi_modal_uuids"] = {"image": [uuids[i]]}
            lora = LoRARequest(*loras[i]) if loras and loras[i] else None
            params = SamplingParams(
                temperature=0,
                max_tokens=max_tokens if isinstance(max_tokens, int) else max_tokens[i],
                ignore_eos=True,
                extra_args={"kv_transfer_params": asked_for} if asked_for else None,
            )
            engine.add_request(name, asked, params, lora_request=lora)
        tokens: list[list[int] | None] = [None] * len(prompts)
        cached = [0] * len(prompts)
        reasons = [""] * len(prompts)
        told: list[Any] = [None] * len(prompts)
        first_s = [0.0] * len(prompts)
        started, step = time.monotonic(), 0
        names = {number: name for name, number in numbers.items()}
        while engine.has_unfinished_requests():
            step += 1
            for number, at in (abort or {}).items():
                if at == step:
                    engine.abort_request([names[int(number)]])
                    reasons[int(number)] = "aborted"
            outputs = engine.step()
            if not outputs:
                time.sleep(0.001)  # as vLLM's own loop: threads that load need the GIL
            for out in outputs:
                i = _number(numbers, out.request_id)
                first_s[i] = first_s[i] or time.monotonic() - started
                if out.finished:
                    tokens[i] = list(out.outputs[0].token_ids)
                    cached[i] = out.num_cached_tokens or 0
                    reasons[i] = str(out.outputs[0].finish_reason)
                    told[i] = out.kv_transfer_params
            if time.monotonic() - started > limit_s:
                return {"stuck": [i for i, done in enumerate(reasons) if not done]}
        seconds = time.monotonic() - started
        return {
            "tokens": tokens,
            "cached": cached,
            "reasons": reasons,
            "told": told,
            "seconds": seconds,
            "first_s": first_s,
        }

    def metrics() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            value = getattr(metric, "value", getattr(metric, "sum", 0))
            found[" ".join([metric.name, *labels.values()])] = value
        return found

    def reset(connector: bool = False, running: bool = False) -> bool:
        return llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def session(segments: list[list[int]], max_tokens: int) -> list[int]:
        return list(run_session(engine, segments, max_tokens, f"session{next(ids)}"))

    def random_load(seconds: float, **settings: Any) -> dict[str, Any]:
        return dict(RandomLoad(llm, **settings).run(seconds))

    def steps_in_flight() -> int:
        core: Any = engine.engine_core
        return int(core.engine_core.batch_queue_size)

    def quiet(limit_s: float = 300.0) -> dict[str, float]:
        """Idle until no host slot is busy; the engine reports only when it steps."""
        until, quiet_steps = time.monotonic() + limit_s, 0
        core: Any = getattr(engine.engine_core, "engine_core", None)
        while True:
            for connector in our_connectors(core and core.scheduler):
                connector.scheduler.adapter.stats.publish_all()
            generate([[3, 4, 5]], 1)
            now = metrics()
            is_busy = bool(now.get("vllm:kvoffload_host_chunks_busy"))
            quiet_steps = 0 if is_busy else quiet_steps + 1
            if quiet_steps > 1 or time.monotonic() > until:
                return now
            # An engine in a process of its own publishes now and then.
            time.sleep(0.1 if core else 1.1 * PERIOD_S)

    def counted() -> dict[str, float]:
        """Idle until all that was counted has been told: workers tell it only now and then."""
        quiet()
        time.sleep(2 * COUNTERS_PERIOD_S)
        quiet()
        return quiet()

    def sleep(level: int) -> None:
        llm.sleep(level=level)
        llm.wake_up()

    def update(path: str) -> None:
        """Load the weights of another folder into the running model."""
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def load_weights(path: str) -> None:
        """Load norms of another folder into the running model, as trainers in its process do."""
        from safetensors.torch import load_file

        core: Any = engine.engine_core
        model = core.engine_core.model_executor.driver_worker.model_runner.get_model()
        state = load_file(os.path.join(path, "model.safetensors"))
        model.load_weights((name, value) for name, value in state.items() if "layernorm" in name)

    calls = {
        "load_weights": load_weights,
        "sleep": sleep,
        "update": update,
        "generate": generate,
        "metrics": metrics,
        "reset": reset,
        "session": session,
        "random_load": random_load,
        "trusted": partial(trusted, llm),
        "steps_in_flight": steps_in_flight,
        "quiet": quiet,
        "counted": counted,
    }
    answer({"ready": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer(calls[order.pop("do")](**order))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def noise(seed: int) -> Any:
    """An image of random pixels."""
    import random

    from PIL import Image

    return Image.frombytes("RGB", (56, 56), random.Random(seed).randbytes(56 * 56 * 3))


def _number(numbers: dict[str, int], request_id: str) -> int:
    # Newer engines add a suffix of their own to the id given.
    return (
        numbers[request_id]
        if request_id in numbers
        else numbers[request_id.split("-", maxsplit=1)[0]]
    )


def answer(value: Any) -> None:
    os.write(int(os.environ["ANSWERS_FD"]), json.dumps({"ok": value}).encode() + b"\n")


if __name__ == "__main__":
    main()
