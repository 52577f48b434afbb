"""The digest of a file by samples at fixed places: of each tensor, where a header lists them.

Training, merging and quantization change nearly every element of the tensors that they change. A
start waits for this digest, so it takes few system calls: three for a tensor, fewer for small ones.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

_SAMPLES = 4
"""Of each tensor: its first bytes, its last ones, and two between them."""
_SAMPLE_BYTES = 256
_WIDE_SAMPLE_BYTES = 1024
_FEW_TENSORS = 256
"""A file of no more has wide samples: an adapter, or a part of a model of large tensors."""
_GAP_BYTES = 1024
"""What lies between two samples is read and counts if it is no more: a call costs as much."""
_READ_BYTES = 64 << 10
"""At once."""
_PIECE_BYTES = 64 << 10
"""A file without a list of its tensors is sampled each so many bytes, but at most so often:"""
_MOST_PIECES = 16_384
_MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by its format."""
_WHOLE_BYTES = 8 << 20
"""Other files up to this size are read whole."""
_WINDOW = 256
"""Samples that are read one after the other; the kernel reads the next ones ahead if it is slow."""
_SLOW_READ_S = 20e-6
"""A sample in the page cache takes less."""


def file_digest(file: Path) -> str:
    """Digest a file by its content: each tensor's header and samples, or a small file whole.

    Raises:
        OSError: it cannot be read, or its size changes meanwhile.
    """
    with open(file, "rb", buffering=0) as data:
        fd, before = data.fileno(), _state(data.fileno())
        size = before[0]
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        header = _header(fd, size) if file.suffix == ".safetensors" else None
        if header is not None:
            digest.update(header[0])
            places = _tensor_samples(*header, size)
        elif size <= _WHOLE_BYTES:
            places = [(0, size)]
        else:
            places = _pieces(size)
        for sample in _samples(fd, places):
            digest.update(sample)
        if _state(fd) != before:
            raise OSError(f"{file} changed while it was read")
    return digest.hexdigest()


_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Tensor(msgspec.Struct, gc=False):
    """An entry of a header; that of remarks has no offsets."""

    data_offsets: tuple[_Offset, _Offset] = (0, 0)


_read_header = msgspec.json.Decoder(dict[str, _Tensor]).decode


def _header(fd: int, size: int) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Return the header of a safetensors file, and the offsets in it; None if it is damaged."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
        return None
    text = _read(fd, 8, length)
    try:
        return text, [tensor.data_offsets for tensor in _read_header(text).values()]
    except (ValueError, RecursionError):
        return None


def _tensor_samples(
    text: bytes, offsets: list[tuple[int, int]], size: int
) -> list[tuple[int, int]]:
    """Return the places of evenly spread samples of each tensor, in the file's order.

    What a small gap divides is one place: the end of a tensor and the beginning of the next, and
    small tensors whole. So a tensor takes at most three reads.
    """
    found = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    found = np.minimum(found + 8 + len(text), size)
    found = found[found[:, 0] < found[:, 1]]
    starts, ends = found[np.argsort(found[:, 0], kind="stable")].T
    width = _WIDE_SAMPLE_BYTES if len(offsets) <= _FEW_TENSORS else _SAMPLE_BYTES
    length = np.minimum(ends - starts, width)
    room = ends - starts - length
    steps = np.arange(_SAMPLES)
    # Divided first, so that no product leaves 64 bits.
    first = starts[:, None] + room[:, None] // (_SAMPLES - 1) * steps
    first[:, -1] = ends - length
    return _joined(first.ravel(), (first + length[:, None]).ravel())


def _joined(starts: Any, ends: Any) -> list[tuple[int, int]]:
    """Join places that overlap or nearly touch; return the start and the length of each."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    if not len(starts):
        return []
    is_first = np.ones(len(starts), dtype=bool)
    is_first[1:] = starts[1:] > ends[:-1] + _GAP_BYTES
    starts, ends = starts[is_first], ends[np.append(is_first[1:], True)]
    lengths = ends - starts
    places = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    return _cut(places) if lengths.max() > _READ_BYTES else places


def _cut(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut places into what is read at once."""
    return [
        (at, min(_READ_BYTES, start + length - at))
        for start, length in places
        for at in range(start, start + length, _READ_BYTES)
    ]


def _pieces(size: int) -> list[tuple[int, int]]:
    """Return evenly spread places of a file, both ends among them."""
    count, length = min(_MOST_PIECES, size // _PIECE_BYTES), _WIDE_SAMPLE_BYTES
    return [((size - length) * i // (count - 1), length) for i in range(count)]


def _samples(fd: int, places: list[tuple[int, int]]) -> Iterator[bytes]:
    is_slow = False
    for first in range(0, len(places), _WINDOW):
        window = places[first : first + _WINDOW]
        for start, length in window if is_slow else ():
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_WILLNEED)
        begun_s = time.monotonic()
        found = [os.pread(fd, length, start) for start, length in window]
        is_slow = time.monotonic() - begun_s > _SLOW_READ_S * len(window)
        wanted = sum([length for _, length in window])
        _check_length(sum(map(len, found)), wanted)
        # One call of the digest for small samples, no copy of large ones.
        yield from found if wanted > _READ_BYTES * 4 else (b"".join(found),)


def _read(fd: int, start: int, length: int) -> bytes:
    data = os.pread(fd, length, start)
    _check_length(len(data), length)
    return data


def _check_length(found: int, wanted: int) -> None:
    if found < wanted:
        raise OSError("the file became shorter while it was read")


def _state(fd: int) -> tuple[int, int]:
    facts = os.fstat(fd)
    return facts.st_size, facts.st_mtime_ns
