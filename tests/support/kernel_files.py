"""The files in which the kernel tells of memory, with what a test wants them to say."""

from pathlib import Path

GIB = 1 << 30


def waiting(percent: float) -> str:
    """Return a pressure file as Linux writes it."""
    return (
        f"some avg10={percent:.2f} avg60=0.10 avg300=0.00 total=13505634\n"
        "full avg10=99.00 avg60=0.00 avg300=0.00 total=3283883"
    )


class KernelFiles:
    """Files in place of those of this machine: 16 GiB, of which 10 are available.

    Args:
        root: to be :data:`kvoffload.memory_limits.ROOT`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.available(10 * GIB)

    def write(self, path: str, text: object) -> None:
        """Write a file, by its path on Linux."""
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_text(str(text).rstrip() + "\n")

    def remove(self, path: str) -> None:
        """Remove a file, as an older kernel has none."""
        (self._root / path).unlink()

    def available(self, num_bytes: int) -> None:
        """Let the machine have so much memory left."""
        lines = f"MemTotal: {16 * GIB >> 10} kB\nMemFree: 0 kB\nMemAvailable: {num_bytes >> 10} kB"
        self.write("proc/meminfo", lines)

    def pressure(self, percent: float) -> None:
        """Let programs wait for memory in this part of the last 10 s."""
        self.write("proc/pressure/memory", waiting(percent))
