"""Stored bytes that are wrong and look right: what only the check of a load tells.

Damage at random moments seldom meets it. Most of it is in no payload, in chunks that nobody asks
for again, or below host memory and tiers that answer first. Here all is wrong that a tier has of
a prompt whose next load has to come from there.
"""

import contextlib
import os
import re
from pathlib import Path

import redis

from kvoffload.backends.header import (
    ALIGNED_BYTES,
    COMPACT_BYTES,
    XXH3_128,
    Header,
    pack_header,
    parse_header,
)
from tests.support.disk_chunks import stored_in

WAYS = ("payload", "key", "namespace")
"""What may be wrong: of an encrypted chunk, always its payload."""


def spoil(way, keys, contents, roots, server, host):
    """Spoil chunks wherever they are.

    Args:
        way: one of :data:`WAYS`.
        keys: of the chunks.
        contents: what begins in each of them, if it is plain.
        roots: folders of tiers.
        server: of Redis; None: there is none.
        host: the server of the host; None: there is none.
    """
    for root in roots:
        for chunk in stored_in(root):
            with contextlib.suppress(OSError):
                if chunk.key in keys and (wrong := _wrong(way, chunk.content(), ALIGNED_BYTES)):
                    chunk.overwrite(0, wrong)
    if server is not None:
        _spoil_values(way, keys, server.port)
    if host is not None:
        with contextlib.suppress(OSError):
            _spoil_memory(host.process.pid, contents)


def _wrong(way, chunk, size):
    """Return a chunk with a wrong payload, or a whole one of another key or namespace."""
    header, payload = parse_header(chunk), chunk[size:]
    if not isinstance(header, Header) or not payload:
        return b""
    if way == "payload" or header.kind != XXH3_128:
        return chunk[:size] + bytes([payload[0] ^ 1]) + payload[1:]
    key = header.key[::-1] if way == "key" else header.key
    namespace = header.namespace[::-1] if way == "namespace" else header.namespace
    other = bytes(len(payload))
    return pack_header(key, namespace, other, header_bytes=size) + other


def _spoil_values(way, keys, port):
    with contextlib.suppress(redis.RedisError), redis.Redis(port=port, socket_timeout=2) as client:
        for key in keys:
            for name in client.keys(b"*{%b}" % key.hex().encode()):
                value = client.get(name)
                if value and (wrong := _wrong(way, value, COMPACT_BYTES)):
                    client.set(name, wrong, keepttl=True)


def _spoil_memory(pid, contents):
    """Change a byte of each chunk in the memory of a server of the host."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    fd = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        for start, end in re.findall(r"^(\w+)-(\w+) rw-s .*memfd:kvoffload-serve", maps, re.M):
            first = int(start, 16)
            memory = os.pread(fd, int(end, 16) - first, first)
            for content in contents:
                if (at := memory.find(content)) >= 0:
                    os.pwrite(fd, bytes([content[0] ^ 1]), first + at)
    finally:
        os.close(fd)
