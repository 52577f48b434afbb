"""Pages of an engine's host memory, whose parts lie far from each other."""

import ctypes

PART = 1000
PAGE = 2 * PART
NUM_PAGES = 64


class Pool:
    """An engine's host memory, with K and V of all pages apart."""

    def __init__(self):
        self.memory = bytearray(NUM_PAGES * PAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def page(self, i):
        half = NUM_PAGES * PART
        return [(self._address + i * PART, PART), (self._address + half + i * PART, PART)]

    def pages(self, numbers):
        return [self.page(i) for i in numbers]

    def fill(self, numbers, seed=0):
        for i in numbers:
            for address, size in self.page(i):
                text = f"{seed} {i} {address - self._address} ".encode() * size
                ctypes.memmove(address, text[:size], size)

    def read(self, numbers):
        return [b"".join(ctypes.string_at(*part) for part in self.page(i)) for i in numbers]


def disk(root, **more):
    """Return the settings of a disk tier."""
    return {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0, **more}
