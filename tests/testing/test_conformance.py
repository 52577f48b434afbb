"""The suite that authors of backends inherit fails on backends that break the contract."""

import ast
import importlib
import inspect
import pkgutil
import time

import pytest

from kvoffload import testing
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.backends.threaded import InlineBackend
from kvoffload.testing import BackendSuite, hazards
from kvoffload.testing.backends import CHUNK_BYTES

BLOCKED_S = 0.06
FEW = 16


class Unverified(MemoryBackend):
    """Returns what it has, damaged or not."""


class Verified(MemoryBackend):
    """Compares with a copy that no damage reaches."""

    def __init__(self, options, namespace):
        super().__init__(options, namespace)
        self.whole = {}

    def store(self, key, chunk):
        self.whole[key] = bytes(chunk)
        return super().store(key, chunk)

    def load(self, key, into):
        if self._chunks.get(key) != self.whole.get(key):
            self._drop(key)
        return super().load(key, into)


class Unforgiving(Verified):
    """Keeps a damaged chunk, and takes no other in its place."""

    def store(self, key, chunk):
        return key in self._chunks or super().store(key, chunk)

    def load(self, key, into):
        return self._chunks.get(key) == self.whole.get(key) and super().load(key, into)


class Sleeping(Verified):
    """Waits for its medium on the loop."""

    verb = "read"

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "verb"):
            time.sleep(BLOCKED_S)
        return super().__getattribute__(name)


class Computing(Verified):
    """Compresses, or the like, on the loop."""

    async def write(self, keys, chunks):
        end = time.thread_time() + BLOCKED_S
        while time.thread_time() < end:
            pass
        return await super().write(keys, chunks)


class Silent(Verified):
    """Evicts without a word."""

    def take_removals(self):
        return []


class Repeating(Verified):
    """Reports a removal again and again."""

    def __init__(self, options, namespace):
        super().__init__(options, namespace)
        self.told = []

    def take_removals(self):
        self.told += super().take_removals()
        return self.told


class Boasting(Verified):
    """Says of chunks for which it has no room that they are stored."""

    def store(self, key, chunk):
        return self._resident_bytes + len(chunk) > self._capacity or super().store(key, chunk)


class Boundless(Verified):
    """Stores more than its capacity."""

    def __init__(self, options, namespace):
        super().__init__(options, namespace)
        self._reported, self._capacity = self._capacity, 1 << 40

    def usage(self):
        return super().usage()._replace(capacity_bytes=self._reported)


class Partial(InlineBackend):
    """Has one method of a protocol, and lacks the rest."""

    has = load = store = delete = lambda self, *_: False

    def __init__(self, options, namespace):
        super().__init__()

    def holds(self, key):
        return False


def test_a_part_of_an_optional_protocol_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"LocalIndex is incomplete .*'holds'.*: inherit it"):
        suite_of(Partial, tmp_path).test_optional_protocols_are_whole()


class Counting(Verified):
    """Keeps a number under the name of a method of its base class."""

    def __init__(self, options, namespace):
        super().__init__(options, namespace)
        self.count = 0


class Sized(Verified):
    """Has a number of its class under such a name."""

    usage = 4096


@pytest.mark.parametrize(("backend", "name"), [(Counting, "count"), (Sized, "usage")])
def test_an_attribute_that_hides_a_method_is_named(backend, name, tmp_path):
    with pytest.raises(AssertionError, match=rf"hide methods .*rename \['{name}'\]"):
        suite_of(backend, tmp_path).test_no_attribute_hides_a_method()


def suite_of(backend, folder):
    class Suite(BackendSuite):
        def open(self, namespace):
            return backend(MemoryOptions(), namespace)

        def open_small(self, namespace):
            return backend(MemoryOptions(capacity=FEW * CHUNK_BYTES), namespace)

        def damage(self, opened, key):
            chunk = bytearray(opened._chunks[key])
            chunk[len(chunk) // 2] ^= 1
            opened._chunks[key] = bytes(chunk)

    suite = Suite()
    suite.folder, suite._opened = folder, []
    return suite


HAZARDS = [
    "test_no_call_blocks_the_loop",
    "test_a_damaged_chunk_is_a_miss_and_can_come_back",
    "test_a_full_store_keeps_its_capacity_and_says_what_left",
]


@pytest.mark.parametrize("test", HAZARDS)
def test_a_good_backend_passes(test, tmp_path):
    getattr(suite_of(Verified, tmp_path), test)()


@pytest.mark.parametrize("verb", ["contains", "read", "write", "remove"])
def test_a_call_that_sleeps_on_the_loop_is_named_with_its_time(verb, tmp_path, monkeypatch):
    monkeypatch.setattr(hazards, "BUSY_S", 1.0)
    backend = type("SleepsIn", (Sleeping,), {"verb": verb})
    with pytest.raises(AssertionError, match=rf"block.*\{{'{verb}': 0\.0[6-9]"):
        suite_of(backend, tmp_path).test_no_call_blocks_the_loop()


@pytest.mark.parametrize(
    ("backend", "test", "shown"),
    [
        (Computing, HAZARDS[0], r"\{'write': \d+\."),
        (Unverified, HAZARDS[1], r"\[True, True, True\] == \[True, False, True\]"),
        (Unforgiving, HAZARDS[1], "cannot be written again"),
        (Silent, HAZARDS[2], "left without a word"),
        (Repeating, HAZARDS[2], "more than once"),
        (Boasting, HAZARDS[2], "missing"),
        (Boundless, HAZARDS[2], "<= 1048576"),
    ],
)
def test_a_backend_that_breaks_the_contract_fails_and_values_are_shown(
    backend, test, shown, tmp_path, monkeypatch
):
    monkeypatch.setattr(hazards, "SETTLED_S", 0.1)
    monkeypatch.setattr(hazards, "BUSY_S", 1.0)
    with pytest.raises(AssertionError, match=shown):
        getattr(suite_of(backend, tmp_path), test)()


def test_what_the_suite_cannot_prove_it_says(tmp_path):
    suite = suite_of(Verified, tmp_path)
    suite.damage = lambda backend, key: BackendSuite.damage(suite, backend, key)
    suite.open_small = lambda namespace: BackendSuite.open_small(suite, namespace)
    with pytest.raises(pytest.skip.Exception, match=r"unproven: .*verif.*override damage"):
        suite.test_a_damaged_chunk_is_a_miss_and_can_come_back()
    with pytest.raises(pytest.skip.Exception, match=r"unproven: .*capacity.*override open_small"):
        suite.test_a_full_store_keeps_its_capacity_and_says_what_left()


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(testing.__path__)])
def test_a_failed_assertion_shows_its_values_in_each_module_that_has_some(name):
    module = importlib.import_module(f"kvoffload.testing.{name}")
    source = ast.parse(inspect.getsource(module))
    asserts = any(isinstance(each, ast.Assert) for each in ast.walk(source))
    assert type(module.__loader__).__name__ == "AssertionRewritingHook" or not asserts
