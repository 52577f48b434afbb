"""What is stored, without a request at a lookup: each writer tells it in one small object a minute.

A manifest has the keys that one writer stored in about a minute, one a line in hexadecimal. Its
name has the time and the writer: ``manifests/NAMESPACE/0029712345-WRITER``. A reader lists the
latest names in the background, and reads each manifest once.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Iterable
from operator import itemgetter

from kvoffload.backends.header import MAX_KEY_BYTES
from kvoffload.backends.object.bucket import Bucket
from kvoffload.backends.object.failures import Failed, Failure
from kvoffload.backends.object.naming import MANIFESTS

log = logging.getLogger(__name__)

EVERY_S = 60.0
MOST_LISTED = 1 << 20
"""Manifests that are looked at: those of 100 writers in seven days. A listing may have no end."""
MOST_KEYS = 1 << 21
"""Keys that are known at most: about 300 MiB. The oldest are forgotten first."""
MOST_BYTES = 32 << 20
"""Of one manifest; a larger one is none of ours, and is passed over."""
_LOOK_BACK = 20
"""Minutes before the last list that are listed again: clocks differ, and S3 allows 15 minutes."""
_NAME = re.compile(r"(\d{10})-[0-9a-f]{16}")
_LINE = re.compile(rb"(?:[0-9a-f]{2})+")


class ManifestIndex:
    """The keys of one namespace that manifests tell. Any thread may call the methods.

    Args:
        bucket: where the manifests are.
        tag: the namespace, as names have it.
        ttl_s: from which age on chunks count as absent.
    """

    def __init__(self, bucket: Bucket, tag: str, ttl_s: float) -> None:
        self._bucket, self._ttl_s = bucket, ttl_s
        self._folder = f"{MANIFESTS}/{tag}"
        self._lock = threading.Lock()
        self._minutes: dict[bytes, int] = {}
        """Keys, and the minute of the manifest that has them; the oldest first."""
        self._untold: dict[bytes, None] = {}
        self._read: dict[str, None] = {}
        """Names of manifests that were read, and may be listed again."""
        self._listed, self._told_s = 0, 0.0
        """The minute of the last list of which all was read, and when manifests were written."""
        self._ended = threading.Event()
        self.is_complete = False
        """Whether all manifests that there were have been read once."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-manifest", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._minutes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._minutes

    def add(self, key: bytes) -> None:
        """Note a chunk that this engine stored, or found stored."""
        with self._lock:
            self._note([key], _minute())
            self._untold[key] = None

    def discard(self, key: bytes) -> None:
        """Forget a chunk that is not there."""
        with self._lock:
            self._minutes.pop(key, None)
            self._untold.pop(key, None)

    def clear(self) -> None:
        """Forget all chunks: they were removed."""
        with self._lock:
            self._minutes, self._untold = {}, {}

    def close(self) -> None:
        """Tell what is untold, and end soon."""
        self._ended.set()

    def join(self) -> None:
        """After :meth:`close`: wait for the end."""
        self._thread.join()

    # ---- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.is_set()
            try:
                self._tell()
                if not is_last:
                    self._listen()
            except (Failed, FileNotFoundError) as error:
                log.debug("object: manifests are not read now: %s", error)
            except Exception:
                log.exception("object: manifests are not read or written now")
            self._ended.wait(EVERY_S)

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        with self._lock:
            keys, self._untold = list(self._untold), {}
        most = max(1, MOST_BYTES // (2 * MAX_KEY_BYTES + 1))
        for begin in range(0, len(keys), most):
            name = f"{self._folder}/{_minute():010d}-{secrets.token_hex(8)}"
            lines = [key.hex().encode() for key in keys[begin : begin + most]]
            try:
                self._bucket.put(name, [b"\n".join(lines)], replace=True)
            except Failed as error:
                log.debug("object: manifests are not written now: %s", error)
                with self._lock:  # the next manifest has them
                    self._untold = dict.fromkeys(keys[begin:][-MOST_KEYS:]) | self._untold
                return
            self._read[name] = None

    def _listen(self) -> None:
        """Read the manifests that are new, the latest first."""
        now = _minute()
        first = max(now - int(self._ttl_s / 60) - 1, self._listed - _LOOK_BACK)
        after = f"{self._folder}/{first:010d}"
        listed: list[str] = []
        for number, each in enumerate(self._bucket.list(self._folder, after)):
            if self._ended.is_set():
                return
            if number == MOST_LISTED:
                raise Failed(Failure("refused_other", "too many manifests"))
            if each.nbytes <= MOST_BYTES:
                listed.append(each.name)
        for name in reversed(listed):
            if self._ended.is_set():
                return
            found = _NAME.fullmatch(name.removeprefix(f"{self._folder}/"))
            if found is None or name in self._read:
                continue
            self._take_in(name, int(found[1]))
            self._read[name] = None
            if time.monotonic() - self._told_s >= EVERY_S:  # all of a week take hours to read
                self._tell()
        self._read = dict.fromkeys(name for name in listed if name in self._read)
        with self._lock:
            self._drop_old(now)
        self.is_complete, self._listed = True, now

    def _take_in(self, name: str, minute: int) -> None:
        try:
            content = self._bucket.fetch(name, MOST_BYTES)
        except FileNotFoundError:
            return  # it was deleted since it was listed
        lines = [line for line in content.split(b"\n") if len(line) <= 2 * MAX_KEY_BYTES]
        keys = [bytes.fromhex(line.decode()) for line in lines if _LINE.fullmatch(line)]
        with self._lock:
            if not self.is_complete:  # they are older than all that are known
                keys = keys[: max(0, MOST_KEYS - len(self._minutes))]
            self._note(keys, minute)

    def _note(self, keys: Iterable[bytes], minute: int) -> None:
        known = self._minutes
        for key in keys:
            known[key] = max(minute, known.pop(key, 0))
        while len(known) > MOST_KEYS:
            del known[next(iter(known))]

    def _drop_old(self, now: int) -> None:
        oldest, known = now - self._ttl_s / 60, list(self._minutes.items())
        if not self.is_complete:  # the latest were read first
            known.sort(key=itemgetter(1))
        self._minutes = {key: each for key, each in known if each >= oldest}


def _minute() -> int:
    return int(time.time() // 60)
