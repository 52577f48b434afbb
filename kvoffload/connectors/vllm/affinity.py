"""Where our threads may run: not only on the core that vLLM has bound its own thread to.

On the CPU vLLM binds a worker's threads to a core each. Threads made afterwards inherit the binding
of the one that makes them: copies, checksums and I/O would all wait for the core that computes.
"""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Let threads made inside run wherever the parent process may; then bind this one again."""
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
