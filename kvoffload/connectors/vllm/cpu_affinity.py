"""Which cores compute, on the CPU, and where our threads may run.

vLLM binds a worker's threads to a core each. Threads made afterwards inherit the binding of the one
that makes them: copies, checksums and I/O would all wait for the core that computes.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

from vllm import envs

RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"

log = logging.getLogger(__name__)


def warn_of_cores(device_type: str) -> None:
    """Say so where vLLM, on the CPU, computes on other cores than it would without a connector.

    With any connector it keeps one core more free, for each rank. On a machine that has not so many
    it keeps none: its scheduler, which polls, then takes turns with the model.
    """
    chosen = RESERVED in os.environ or envs.VLLM_CPU_OMP_THREADS_BIND != "auto"
    if device_type == "cpu" and not chosen:
        log.warning(
            "kvoffload: on the CPU vLLM keeps one core more free with a connector than without, "
            "or none at all if it has too few. Set the environment variable %s to the number of "
            "ranks: then it computes on as many cores as without.",
            RESERVED,
        )


@contextlib.contextmanager
def unbound(device_type: str) -> Iterator[None]:
    """Let threads made inside run wherever the parent process may; then bind this one again.

    Only on the CPU, where vLLM binds a worker to the cores that compute. The worker of a GPU is
    bound to cores near its device, if at all: these suit our threads as well.
    """
    if device_type != "cpu":
        yield
        return
    try:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) | bound)
    except (AttributeError, OSError):  # not Linux, or not allowed
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
