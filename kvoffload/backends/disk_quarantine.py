"""The files that failed verification: a few are kept for a look at them."""

import contextlib
import logging
from collections.abc import Callable

from kvoffload.backends.disk_bounds import Bounds
from kvoffload.backends.disk_layout import QUARANTINE
from kvoffload.backends.vfs import Vfs

log = logging.getLogger(__name__)


def trim(vfs: Vfs, root: str, bounds: Bounds, remove: Callable[[str], None]) -> None:
    """Keep the newest few, and no more than a sixteenth of the capacity.

    ``remove`` removes a file and books that; it raises OSError where it cannot.
    """
    folder = f"{root}/{QUARANTINE}"
    kept_bytes = 0
    try:
        files = sorted(vfs.listdir(folder), reverse=True)
    except OSError as error:
        log.warning("disk: cannot trim %s: %s", folder, error)
        return
    for number, file in enumerate(files):
        with contextlib.suppress(OSError):  # tried again with the next one set aside
            kept_bytes += vfs.lstat(f"{folder}/{file}").st_blocks * 512
            too_many = number >= bounds.quarantine_files
            if too_many or kept_bytes * 16 > bounds.capacity_bytes:
                remove(f"{folder}/{file}")
