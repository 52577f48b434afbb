"""What told returns earn: a trace through the real manager of host memory, with and without.

``python -m benchmarks.replays.returns TRACE --sizes 1000,3000``, or ``--synthetic agent:seed=5`` in
place of the trace. Sessions are found by their prompts. A row says how requests tell of their
session's next one, or lie.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvoffload.config import RETURN_HINTS
from kvoffload.offload.base import ReqContext
from kvoffload.offload.hints import PARAM
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.registry import POLICIES, load
from kvoffload.replay import synthetic
from kvoffload.replay.loop_stores import chunks_of
from kvoffload.replay.sessions import gaps_of, sessions_of
from kvoffload.replay.simulate import belady
from kvoffload.replay.trace import Trace, from_timed, read_trace

Tell = Callable[[int], dict[str, Any]]
"""From the number of a request to its hints."""


def hits(trace: Trace, slots: int, policy: str, tell: Tell) -> float:
    """Serve all requests one by one; return the prefix hits in percent of all blocks."""
    now = [0.0]
    host = HostCache(slots, load(POLICIES, policy, "policy")(slots))
    host.now_s = lambda: now[0]
    manager = TieredOffloadingManager(host, client_hints=RETURN_HINTS)
    found = 0
    for number, request in enumerate(trace.requests):
        now[0] = trace.requests.times[number]
        keys, told = chunks_of(request), tell(number)
        context = ReqContext(str(number), {PARAM: told} if told else None)
        manager.touch(keys, context)
        here = manager.lookup_prefix(keys, context)[0]
        found += here
        if here:
            job = manager.begin_load(keys[:here], context)
            manager.complete(job, [True] * len(job.keys))
        stored = manager.prepare_store(keys, context)
        if stored is not None and stored.job is not None:
            manager.complete(stored.job, [True] * len(stored.job.keys))
        manager.retire(keys, context)
    return 100 * found / trace.accesses


def tellers(trace: Trace, seed: int = 1) -> Iterator[tuple[str, Tell]]:
    """Yield what each row does: its name, and what its requests say."""
    sessions = sessions_of(trace.requests)
    gaps = gaps_of(trace.requests, sessions)
    session_of = {number: i for i, numbers in enumerate(sessions) for number in numbers}
    rng = random.Random(seed)

    def say(number: int, gap_s: float, named: bool = True) -> dict[str, Any]:
        told = {"returns": "never"} if gap_s == math.inf else {"returns_in_s": gap_s}
        return {"session": str(session_of[number]), **told} if named else told

    def lies(share: float) -> Tell:
        others = [rng.choice(gaps) if rng.random() < share else gap_s for gap_s in gaps]
        return lambda number: say(number, others[number])

    def roughly() -> Tell:
        factors = [math.exp(rng.uniform(-1, 1)) for _ in gaps]
        return lambda number: say(number, gaps[number] * factors[number])

    def classes(number: int) -> dict[str, Any]:
        limits = {60: "soon", 600: "minutes", math.inf: "hours"}
        gap_s = gaps[number]
        name = next((name for limit, name in limits.items() if gap_s < limit), "never")
        return {"session": str(session_of[number]), "returns": name}

    def done(number: int) -> dict[str, Any]:
        return say(number, math.inf) if gaps[number] == math.inf else {}

    yield "told nothing", lambda number: {}
    yield "told exactly", lambda number: say(number, gaps[number])
    yield "exactly, without a session", lambda number: say(number, gaps[number], named=False)
    yield "by a factor of up to e", roughly()
    yield "in four classes", classes
    yield "10 % lies", lies(0.1)
    yield "30 % lies", lies(0.3)
    yield "every other session", lambda n: say(n, gaps[n]) if session_of[n] % 2 else {}
    yield "only that it ended", done
    yield "1 s, a tenth of the sessions", lambda n: {} if session_of[n] % 10 else say(n, 1.0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--synthetic", default="")
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--policy", default="handicap")
    asked = parser.parse_args(words)
    if asked.trace is not None:
        trace = read_trace(asked.trace)
    else:
        name = asked.synthetic
        trace = from_timed(name, synthetic.timed(*synthetic.parse(name)))
    sizes = [int(size) for size in asked.sizes.split(",")]
    print(f"{trace.name}: prefix hits in percent, by blocks in host memory")
    print(f"{'':30}" + "".join(f"{size:>9,}" for size in sizes))
    for name, tell in tellers(trace):
        rates = (hits(trace, size, asked.policy, tell) for size in sizes)
        print(f"{name:30}" + "".join(f"{rate:9.2f}" for rate in rates), flush=True)
    for name, takes_each in (("belady, the bound", False), ("belady that takes each block", True)):
        found = (belady(trace.requests, size, takes_each=takes_each) for size in sizes)
        print(f"{name:30}" + "".join(f"{100 * each.prefix_rate:9.2f}" for each in found))


if __name__ == "__main__":
    main()
