"""Pages of an engine's host memory, whose parts lie far from each other."""

import ctypes

PART = 1000
PAGE = 2 * PART
NUM_PAGES = 64


class Pool:
    """An engine's host memory, with the parts of all pages apart: K and V, say."""

    def __init__(self, parts=(PART, PART), num_pages=NUM_PAGES):
        self.memory = bytearray(num_pages * sum(parts))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        starts = [num_pages * sum(parts[:i]) for i in range(len(parts))]
        self._parts = list(zip(starts, parts, strict=True))

    def page(self, i):
        return [(self._address + start + i * size, size) for start, size in self._parts]

    def pages(self, numbers):
        return [self.page(i) for i in numbers]

    def fill(self, numbers, seed=0):
        for i in numbers:
            for address, size in self.page(i):
                text = f"{seed} {i} {address - self._address} ".encode() * size
                ctypes.memmove(address, text[:size], size)

    def put(self, contents):
        """Fill the first pages with these bytes."""
        for i, data in enumerate(contents):
            done = 0
            for address, size in self.page(i):
                ctypes.memmove(address, data[done : done + size], size)
                done += size

    def read(self, numbers):
        return [b"".join(ctypes.string_at(*part) for part in self.page(i)) for i in numbers]


def disk(root, **more):
    """Return the settings of a disk tier."""
    return {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0, **more}
