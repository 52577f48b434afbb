"""Random load on an engine in this process, whose answers are compared with what is right.

Requests arrive, are aborted, preempted and sampled twice. Some answers are bound to a grammar,
which vLLM compiles while the request waits. Sessions come in segments. The caches are reset in all
ways, the engine sleeps, and I/O processes are killed. All but times follows from a seed.
"""

import contextlib
import itertools
import random
import time
from collections import Counter

import psutil
from streaming import send
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

MARGIN = 0.01
"""By how much the best token must lead: below it, outputs may depend on how work is batched."""
MOST_LIVE = 20
LIMIT_S = 300.0
"""How long all may take to end."""


def grammar():
    """Return a grammar: words of the tiny models' tokenizer that end with an even digit."""
    return StructuredOutputsParams(regex="(w[0-9]*[02468])+")


def trusted(llm, prompts, max_tokens, is_bound=False):
    """Return for each prompt its greedy tokens up to the first that another one comes close to."""
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        logprobs=2,
        ignore_eos=True,
        structured_outputs=grammar() if is_bound else None,
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    told = []
    for answer in llm.generate(asked, params, use_tqdm=False):
        (output,) = answer.outputs
        sure = []
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
            best, second, *_ = sorted((each.logprob for each in logprobs.values()), reverse=True)
            if best - second < MARGIN:
                break
            sure.append(token)
        told.append(sure)
    return told


class RandomLoad:
    """Drives an engine.

    Args:
        llm: vLLM's ``LLM``; the core of its engine has no process of its own.
        prompts: token ids.
        told: the trusted tokens of each prompt.
        bound: those of answers that are bound to the grammar.
        seed: of all that is random.
        max_tokens: at most made for a request.
        adapters: folders of LoRA adapters. With them nothing is compared: on a CPU vLLM alone
            computes other requests of their batches wrongly.
    """

    def __init__(self, llm, prompts, told, bound, seed, max_tokens, adapters=()):
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._prompts, self._told, self._bound = prompts, told, bound
        self._rng, self._max_tokens = random.Random(seed), max_tokens
        self._adapters = [LoRARequest(f"a{i}", i, path) for i, path in enumerate(adapters, start=1)]
        self._live = {}
        """Request → its prompt's place, whether it is sampled twice, whether a grammar binds it."""
        self._sessions = {}
        """Session → its name in the engine, and the segments to come."""
        self._numbers = iter(range(1 << 30))
        self._done = Counter()
        self._wrong = []

    def run(self, seconds):
        """Go on for so long, then let everything end; return what was seen."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._act()
            self._step()
        limit_s = time.monotonic() + LIMIT_S
        while self._live or self._sessions or self._core.scheduler.has_requests():
            if time.monotonic() > limit_s:
                return {"stuck": [*self._live, *self._sessions], **self._done}
            self._feed_sessions()
            self._step()
            time.sleep(0.0005)
        left = self._left()
        return {**self._done, "wrong": self._wrong, "left": left}

    def _act(self):
        chance = self._rng.random()
        if chance < 0.3 and len(self._live) < MOST_LIVE:
            self._add()
        elif chance < 0.33 and self._live:
            self._abort(self._rng.choice(sorted(self._live)))
        elif chance < 0.345:
            self._begin_session()
        elif chance < 0.36:
            self._reset()
        elif chance < 0.365:
            self._kill_io_process()
        elif chance < 0.37:
            self._sleep()
        self._feed_sessions()

    def _add(self):
        place = self._rng.randrange(len(self._prompts))
        name = f"r{next(self._numbers)}"
        # Greedy, but for vLLM's refusal of several such. (Triton's interpreter runs no `top_k`.)
        is_double = self._rng.random() < 0.15
        sampling = {"n": 2, "temperature": 1.0, "min_p": 1.0} if is_double else {"temperature": 0}
        is_bound = not is_double and self._rng.random() < 0.15
        hints = self._rng.choice([None, None, {"max_load_tokens": 100}, {"offload": False}])
        params = SamplingParams(
            **sampling,
            max_tokens=self._rng.randrange(1, self._max_tokens + 1),
            ignore_eos=True,
            structured_outputs=grammar() if is_bound else None,
            extra_args={"kv_transfer_params": {"kvoffload": hints}} if hints else None,
        )
        self._live[name] = place, is_double, is_bound
        asked = {"prompt_token_ids": self._prompts[place]}
        adapter = self._rng.choice([None, *self._adapters]) if self._adapters else None
        self._engine.add_request(name, asked, params, lora_request=adapter)
        self._done["requests"] += 1
        self._done["adapted"] += adapter is not None
        self._done["bound"] += is_bound

    def _abort(self, name):
        self._engine.abort_request([name])
        del self._live[name]
        self._done["aborted"] += 1

    def _step(self):
        for out in self._engine.step():
            name = out.request_id.split("-", maxsplit=1)[0]
            if out.finished and name in self._live:
                asked = self._live.pop(name)
                self._done["cached"] += out.num_cached_tokens or 0
                for answer in out.outputs:
                    self._compare(asked, list(answer.token_ids), out.num_cached_tokens)

    def _compare(self, asked, tokens, cached):
        place, _, is_bound = asked
        right = (self._bound if is_bound else self._told)[place][: len(tokens)]
        if self._adapters:
            return
        self._done["compared"] += len(right)
        if tokens[: len(right)] != right:
            self._wrong.append([*asked, tokens, right, cached])

    # ---- sessions ----

    def _begin_session(self):
        """Begin one whose tokens are those of a prompt: a token made after a segment is dropped."""
        prompt = self._rng.choice(self._prompts)
        cuts = sorted(self._rng.sample(range(1, len(prompt)), min(2, len(prompt) - 1)))
        bounds = [0, *cuts, len(prompt)]
        segments = [prompt[a:b] for a, b in itertools.pairwise(bounds)]
        self._sessions[f"s{next(self._numbers)}"] = [None, segments]
        self._done["sessions"] += 1

    def _feed_sessions(self):
        for name, (internal, segments) in list(self._sessions.items()):
            if segments:
                if self._rng.random() < 0.1:
                    internal = send(self._engine, name, internal, segments.pop(0), 1)
                    self._sessions[name][0] = internal
                    if not segments:
                        send(self._engine, name, internal, [0], 1, resumable=False)
            elif internal not in self._core.scheduler.requests:
                del self._sessions[name]

    # ---- what happens to an engine ----

    def _reset(self):
        running, connector = self._rng.random() < 0.5, self._rng.random() < 0.5
        try:
            self._engine.reset_prefix_cache(running, connector)
            self._done["resets"] += 1
        except RuntimeError:  # vLLM's own, while a request loads
            self._done["resets refused"] += 1

    def _kill_io_process(self):
        """Kill that of one rank, or of all."""
        is_for_all = self._rng.random() < 0.5
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "kvoffload.io.process" in process.cmdline():
                    process.kill()
                    self._done["kills"] += 1
                    if not is_for_all:
                        return

    def _sleep(self):
        """Sleep and wake up. What runs is aborted, or kept and computed again."""
        level, mode = self._rng.choice([1, 2]), self._rng.choice(["abort", "keep"])
        if mode == "abort":  # an engine core in this process does not tell of those that it aborts
            for name in sorted(self._live):
                self._abort(name)
            self._sessions.clear()
        try:
            self._engine.sleep(level, mode)
            self._done["sleeps"] += 1
        except RuntimeError:  # as of a reset
            self._done["sleeps refused"] += 1
        self._engine.wake_up()

    # ---- the end ----

    def _left(self):
        """Return what should be nothing when nothing runs."""
        scheduler = self._core.scheduler
        if scheduler.connector is None:
            return {}
        connector, pool = scheduler.connector, scheduler.kv_cache_manager.block_pool
        half = connector.connector_scheduler
        adapter, queue = half.adapter, half.adapter.manager.waiting
        self._done["loaded"] = adapter.manager.figures.hit_tokens.total()
        self._done["kept"] = queue._counts["kept"]
        tables = {
            "requests": half._req_status,
            "vLLM's jobs": half._jobs,
            "our jobs": half._table,
            "blocks of stores": half._block_id_to_pending_jobs,
            "due requests": half._due._full_at,
            "refused chunks": adapter.refused,
            "unplaced chunks": adapter.unplaced,
            "jobs to take": adapter._jobs,
            "queued requests": queue.requests,
            "claims": adapter.manager._host.claims,
            "lacking requests": queue._lacking,
            "chunks that stores keep": queue.needed._told,
        }
        left = {name: len(table) for name, table in tables.items()}
        left["busy slots"] = adapter.manager.busy_slots
        left["GPU blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return {name: count for name, count in left.items() if count}
