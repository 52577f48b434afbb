"""The clock of this host that leases, limits and ages are measured by.

It goes on while the host sleeps, as the file server's does. Other hosts give away meanwhile what is
reserved for this one. A virtual machine that its hypervisor stops has no such clock.
"""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the first


def now_s() -> float:
    """Return the seconds since some moment in the past."""
    return time.clock_gettime(_CLOCK)
