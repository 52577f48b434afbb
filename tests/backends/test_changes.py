"""Keys that changed, noted by many threads and taken by one."""

import sys
import threading

from kvoffload.backends.changes import ChangedKeys


def test_keys_are_kept_for_a_reader_alone_and_the_latest_come_first():
    changes = ChangedKeys()
    changes.note(b"before")
    assert (len(changes), changes.is_read, changes.take(9)) == (0, False, [])
    changes.begin_parts([[b"a", b"b"]])
    for key in (b"c", b"a", b"d") * 9:  # each is kept once, however often it changes
        changes.note(key)
    changes.note_all([b"c", b"d"])
    assert len(changes) == 5
    assert changes.take(0) == []
    assert changes.take(2) == [b"d", b"a"]
    assert changes.take(2) == [b"c", b"b"]
    assert changes.take(3) == [b"a"], "it was present, and has changed since then"
    assert (changes.take(3), len(changes)) == ([], 0)
    assert changes.is_read


def test_keys_that_were_not_taken_stay_when_it_is_begun_again():
    changes = ChangedKeys()
    changes.begin_parts(())
    changes.note(b"gone")
    changes.begin_parts([[b"present"]])
    assert sorted(changes.take(9)) == [b"gone", b"present"]
    for _ in range(3):
        changes.begin_parts([[b"a", b"b"]])
    assert sorted(changes.take(9)) == [b"a", b"b"], "as much is kept as is there"


def test_parts_are_listed_one_after_the_other_and_as_they_are_by_then():
    changes, parts = ChangedKeys(), [{b"a1", b"a2"}, {b"b": None}, set()]
    changes.begin_parts(parts)
    assert (len(changes), changes.is_read, bool(changes)) == (3, True, True)
    assert changes.take(1) == [b"b"]
    changes.note(b"new")
    parts[0] -= {b"a1"}  # it is noted as well
    changes.note(b"a1")
    assert changes.take(9) == [b"a1", b"new", b"a2"]
    assert not changes
    changes.begin_parts(parts)
    changes.begin_parts(parts)
    assert sorted(changes.take(9)) == [b"a2", b"b"]


def test_what_comes_into_an_empty_part_is_listed_once():
    changes, part = ChangedKeys(), {}
    changes.begin_parts([part.keys()])
    assert changes.take(9) == []
    part[b"new"] = None
    changes.note(b"new")
    assert changes.take(9) == [b"new"]
    assert changes.take(9) == []


def test_no_change_is_lost_while_it_is_noted():
    """The reader takes a key first, and then looks: its last look at each key is right."""
    changes, state, seen = ChangedKeys(), dict.fromkeys(range(8), 0), {}
    changes.begin_parts(())
    before, over = sys.getswitchinterval(), threading.Event()

    def read():
        for key in changes.take(3):
            seen[key[0]] = state[key[0]]

    def write(key):
        for number in range(1, 3000):
            state[key] = number
            changes.note(bytes([key]))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=write, args=(key,)) for key in state]
        reader = threading.Thread(target=lambda: [read() for _ in iter(over.is_set, True)])
        for thread in (reader, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        reader.join()
    finally:
        sys.setswitchinterval(before)
    while changes:
        read()
    assert seen == dict.fromkeys(state, 2999)
