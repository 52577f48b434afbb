"""Keys that changed, noted by many threads and taken by one."""

import sys
import threading

from kvoffload.backends.changes import ChangedKeys


def test_keys_are_kept_for_a_reader_alone_each_once_and_the_latest_come_first():
    changes = ChangedKeys()
    changes.note(b"before")
    assert (len(changes), changes.is_read, changes.take(9)) == (0, False, [])
    changes.begin([b"a", b"b"])
    for key in (b"c", b"a", b"d"):
        changes.note(key)
    assert len(changes) == 4
    assert changes.take(0) == []
    assert changes.take(3) == [b"d", b"c", b"b"]
    assert changes.take(3) == [b"a"]
    assert changes.is_read


def test_keys_that_were_not_taken_stay_when_it_is_begun_again():
    changes = ChangedKeys()
    changes.begin(())
    changes.note(b"gone")
    changes.begin([b"present"])
    assert changes.take(9) == [b"present", b"gone"]


def test_no_change_is_lost_while_it_is_noted():
    """The reader takes a key first, and then looks: its last look at each key is right."""
    changes, state, seen = ChangedKeys(), dict.fromkeys(range(8), 0), {}
    changes.begin(())
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
