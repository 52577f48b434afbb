"""Chunks as another version of kvoffload writes them."""

import struct

import pytest
import xxhash

VERSION, KIND = 8, 12
"""Offsets of fields in the header."""
OTHERS = pytest.mark.parametrize(("offset", "value"), [(VERSION, 2), (VERSION, 0), (KIND, 9)])


def resealed(chunk, header_bytes, offset, value):
    """Return a chunk with a number of 16 bits in its header changed, and a right seal."""
    body = bytearray(chunk[: header_bytes - 8])
    struct.pack_into("<H", body, offset, value)
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + chunk[header_bytes:]
