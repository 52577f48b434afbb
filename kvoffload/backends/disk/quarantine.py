"""The files that failed verification: a few are kept for a look at them."""

import contextlib
import logging
import time
from collections.abc import Callable

from kvoffload.backends.disk.limits import Limits
from kvoffload.backends.disk.paths import QUARANTINE
from kvoffload.backends.disk.vfs import Vfs

log = logging.getLogger(__name__)

QUARANTINE_S = 7 * 86400.0
"""No damaged file is kept longer: it is somebody's prompt."""


def trim(vfs: Vfs, root: str, bounds: Limits, remove: Callable[[str], None]) -> None:
    """Keep the newest few, a week or ``ttl_s`` at most, and a sixteenth of the capacity.

    ``remove`` removes a file and books that; it raises OSError where it cannot.
    """
    folder = f"{root}/{QUARANTINE}"
    kept_bytes = 0
    oldest_ns = time.time_ns() - int(min(QUARANTINE_S, bounds.ttl_s or QUARANTINE_S) * 1e9)
    try:
        files = sorted(vfs.listdir(folder), reverse=True)
    except OSError as error:
        log.warning("disk: cannot trim %s: %s", folder, error)
        return
    for number, file in enumerate(files):
        with contextlib.suppress(OSError):  # tried again with the next one set aside
            facts = vfs.lstat(f"{folder}/{file}")
            kept_bytes += facts.st_blocks * 512
            too_many = number >= bounds.quarantine_files
            too_old = facts.st_ctime_ns < oldest_ns  # changed last when it was set aside
            if too_many or too_old or kept_bytes * 16 > bounds.capacity_bytes:
                remove(f"{folder}/{file}")
