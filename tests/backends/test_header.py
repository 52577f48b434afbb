"""The header of stored chunks: nothing that was changed passes for what was written."""

import random
import struct
import sys
import threading
import time

import pytest

from kvoffload.backends import header as fmt
from kvoffload.testing import payload_of
from tests.support.other_version import OTHERS, resealed

KEY = bytes(range(36))
NAMESPACE = fmt.namespace_digest("v1-test")
PAYLOAD = payload_of(KEY, 8192)


def mismatch(header, key, namespace, payload_bytes):
    return fmt.mismatch(fmt.parse_header(header), key, namespace, payload_bytes)


@pytest.mark.parametrize("size", [fmt.COMPACT_BYTES, fmt.ALIGNED_BYTES])
def test_what_was_packed_is_accepted(size):
    header = fmt.pack_header(KEY, NAMESPACE, PAYLOAD, header_bytes=size)
    assert len(header) == size
    assert fmt.check_chunk(header, PAYLOAD, KEY, NAMESPACE) is None
    assert mismatch(header, KEY, NAMESPACE, len(PAYLOAD)) is None
    found = fmt.parse_header(header)
    assert isinstance(found, fmt.Header)
    assert (found.key, found.payload_bytes, found.namespace) == (KEY, 8192, NAMESPACE)


@pytest.mark.parametrize("size", [fmt.COMPACT_BYTES, fmt.ALIGNED_BYTES])
def test_every_flipped_bit_of_the_header_is_noticed(size):
    header = bytearray(fmt.pack_header(KEY, NAMESPACE, PAYLOAD, header_bytes=size))
    for bit in range(size * 8):
        header[bit // 8] ^= 1 << bit % 8
        assert mismatch(header, KEY, NAMESPACE, len(PAYLOAD)) is not None, bit
        header[bit // 8] ^= 1 << bit % 8
    assert mismatch(header, KEY, NAMESPACE, len(PAYLOAD)) is None


def test_a_hundred_thousand_changed_payloads_are_noticed():
    rng = random.Random(20260101)
    payload = bytearray(PAYLOAD)
    header = fmt.pack_header(KEY, NAMESPACE, payload)
    for _ in range(100_000):
        at = rng.randrange(len(payload))
        length = 1 if rng.random() < 0.5 else rng.randrange(1, len(payload) - at + 1)
        kept = payload[at : at + length]
        if length == 1:
            payload[at] ^= 1 << rng.randrange(8)
        elif rng.random() < 0.3:
            payload[at : at + length] = bytes(length)
        else:
            payload[at : at + length] = rng.randbytes(length)
        changed = payload[at : at + length] != kept
        assert (fmt.check_chunk(header, payload, KEY, NAMESPACE) == "payload") == changed
        payload[at : at + length] = kept
    assert fmt.check_chunk(header, payload, KEY, NAMESPACE) is None


def test_reasons_name_what_differs():
    header = fmt.pack_header(KEY, NAMESPACE, PAYLOAD)
    other = fmt.namespace_digest("v1-other")
    assert mismatch(header, KEY[::-1], NAMESPACE, 8192) == "key"
    assert mismatch(header, KEY, other, 8192) == "namespace"
    assert mismatch(header, KEY, NAMESPACE, 8191) == "length"
    assert mismatch(header[:100], KEY, NAMESPACE, 8192) == "short"
    assert mismatch(b"", KEY, NAMESPACE, 8192) == "short"
    assert mismatch(bytes(256), KEY, NAMESPACE, 8192) == "magic"
    assert mismatch(b"\x80\x04" + bytes(300), KEY, NAMESPACE, 8192) == "magic"


@OTHERS
def test_a_sealed_header_of_another_version_or_kind_is_no_damage(offset, value):
    header = fmt.pack_header(KEY, NAMESPACE, PAYLOAD)
    sealed = resealed(header, fmt.COMPACT_BYTES, offset, value)
    assert mismatch(sealed, KEY, NAMESPACE, 8192) == fmt.OTHER_VERSION
    assert fmt.counted_as(fmt.OTHER_VERSION) == "other_version"
    unsealed = bytearray(header)
    struct.pack_into("<H", unsealed, offset, value)
    assert mismatch(unsealed, KEY, NAMESPACE, 8192) == "header"


def test_an_absurd_declared_length_is_a_mismatch_and_nothing_is_allocated():
    body = bytearray(fmt.pack_header(KEY, NAMESPACE, PAYLOAD)[:-8])
    struct.pack_into("<Q", body, 16, 2**63)
    sealed = bytes(body) + struct.pack("<Q", fmt.xxhash.xxh3_64_intdigest(bytes(body)))
    assert mismatch(sealed, KEY, NAMESPACE, 8192) == "length"


@pytest.mark.parametrize("key", [b"", bytes(fmt.MAX_KEY_BYTES + 1)])
def test_keys_that_do_not_fit_are_misuse(key):
    with pytest.raises(ValueError, match="a key has"):
        fmt.pack_header(key, NAMESPACE, PAYLOAD)


def test_random_bytes_are_never_a_header():
    rng = random.Random(7)
    for _ in range(20_000):
        junk = rng.randbytes(rng.choice((0, 17, 255, 256, 300, 4096)))
        assert isinstance(fmt.parse_header(junk), str)
        assert isinstance(fmt.parse_header(fmt.MAGIC + b"\1\0" + junk), str)


def test_the_bytes_are_those_of_the_specification():
    header = fmt.pack_header(b"\x01\x02", fmt.namespace_digest("n"), b"payload")
    assert header[:24].hex() == (
        "894b564f46460d0a"  # magic
        "0100" "0001" "0100" "0200"  # version, header bytes, checksum kind, key length
        "0700000000000000"  # payload length
    )  # fmt: skip
    assert header[24:40] == fmt.checksum(b"payload")
    assert header[40:72] == fmt.namespace_digest("n")
    assert header[72:74] == b"\x01\x02"
    assert not any(header[74:248])


def test_a_checksum_of_much_is_not_the_one_shot_function_which_holds_the_gil(monkeypatch):
    """Before xxhash 4 it holds the GIL for the whole chunk; ``update`` releases it in all."""
    assert fmt.one_shot_bytes("3.5.0") == 64 << 10 < fmt.one_shot_bytes("4.1.0")
    monkeypatch.setattr(fmt, "_ONE_SHOT_BYTES", fmt.one_shot_bytes("3.5.0"))
    most = (64 << 10) // len(PAYLOAD) * PAYLOAD
    short, long = most, most + PAYLOAD
    expected = [fmt.xxhash.xxh3_128_digest(each) for each in (short, long)]
    digest, asked = fmt.xxhash.xxh3_128_digest, []

    def one_shot(payload):
        asked.append(len(payload))
        return digest(payload)

    monkeypatch.setattr(fmt.xxhash, "xxh3_128_digest", one_shot)
    assert [fmt.checksum(each) for each in (short, long)] == expected
    assert [fmt.checksum(memoryview(each)) for each in (short, long)] == expected
    assert asked == [len(short)] * 2
    assert fmt.checksum(b"") == fmt.checksum(memoryview(b""))


def test_another_thread_goes_on_during_a_checksum():
    """With this switch interval a thread gets the GIL only where another releases it."""
    payload = memoryview(bytearray(16 << 20))
    turns, stopping = [0], threading.Event()

    def other():
        while not stopping.is_set():
            turns[0] += 1
            time.sleep(0.0002)

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(60.0)
        for _ in range(300):
            before = turns[0]
            fmt.checksum(payload)
            if advanced := turns[0] > before:
                break
    finally:
        sys.setswitchinterval(interval)
        stopping.set()
        thread.join()
    assert advanced
