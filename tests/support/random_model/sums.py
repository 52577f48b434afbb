"""What must be empty, equal or bounded while nothing is in flight."""

import contextlib
import gc
import json
import os
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil

from kvoffload.backends.disk.descriptors import MOST_KEPT
from kvoffload.backends.disk.limits import read as read_limits
from kvoffload.backends.disk.segments import MOST_SIZES
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.io.protocol import Store
from tests.support.disk_chunks import stored_in
from tests.support.manager_check import check
from tests.support.random_model.cache import PERIOD
from tests.support.random_model.hostile import Rough

REST_S = 20.0
"""A model that is not at rest after so long has lost something."""
_BUFFERS_BYTES = 256 << 10
"""What a Redis server may hold above its limit for a moment."""
FOLDER_THREADS = 2
"""Of a folder tier, for chunks, and as many for lookups."""
_LATE_THREADS = {"kvoffload-redis-slots"} | {
    f"kvoffload-folder-{which}{number}"
    for which in ("", "lookup-")
    for number in range(FOLDER_THREADS)
}


def tables(connector):
    """All tables that hold something only while something is in flight, by their names."""
    transfers, manager = connector._transfers, connector._manager
    host, writes, promises = manager._host, manager._write_through, manager.promises
    found = {
        "requests": connector._requests,
        "jobs": transfers.jobs,
        "unsettled jobs": transfers.jobs.unsettled,
        "jobs of blocks": transfers.jobs._using,
        "outcomes": transfers._outcomes,
        "ended requests": transfers._ended,
        "engine jobs": connector._worker._jobs,
        "settled jobs": connector._worker._settled,
        "manager's jobs": manager._jobs,
        "pinned": host.pinned,
        "more uses": host._more_uses,
        "incoming": host.incoming,
        "fetching": host.fetching,
        "orphans": host._orphans,
        "abandoned": host._abandoned,
        "turns": host.turns,
        "begun jobs": manager._jobs.begun,
        "declined": promises._declined,
        "counted uses": connector._uses._counted,
        "kept for the queue": host.claims,
        "kept chunks that are gone": manager.waiting.claims.gone,
        "queued requests": manager.waiting.requests,
        "requests not listed": manager.waiting._newcomers,
        "lacking requests": manager.waiting._lacking,
        "shared claims": manager.waiting.claims._more,
        "queued tenants": manager.waiting.claims.tenants,
        "chunks that stores keep": manager.waiting.needed._told,
        "retiring": manager._retirement._in_flight,
    }
    for tier, waiting in writes._waiting.items():
        found[f"bytes kept for {tier.name}"] = range(writes._kept_bytes[tier.name])
        found[f"waiting for {tier.name}"] = waiting
    for name, loads in promises._loads.items():
        found[f"bytes of early reads from {name}"] = range(loads.early_bytes)
        found[f"late bytes of {name}"] = range(loads.late_bytes)
        found[f"bytes in flight from {name}"] = range(loads.flying_bytes)
        found[f"loads in flight from {name}"] = range(loads.in_flight)
    if (client := connector._spec.io) is not None:
        found["I/O jobs"] = client._jobs.unanswered
        found["late I/O jobs"] = client._jobs.late
        found["bytes unsent"] = client._link._out
        found["kept for the queue in stores"] = client._awaited
        for name, tier in client.tiers.items():
            found[f"being forgotten by {name}"] = tier._forgetting
            found[f"unsent to {name}"] = tier.unsent
    return found


def await_quiet(engine):
    """Wait until every table is empty and every slot is free or evictable."""
    connector, until_s = engine.connector, time.monotonic() + REST_S
    while True:
        connector.poll()
        left = {name: len(table) for name, table in tables(connector).items() if len(table)}
        busy = connector._manager.busy_slots
        if not left and not busy:
            break
        assert time.monotonic() < until_s, f"not at rest: {left}, {busy} slots busy"
        time.sleep(0.01)
    check(connector)
    check_counts(engine)
    assert engine.lost_blocks == 0, f"{engine.lost_blocks} blocks of the engine are lost"


def check_counts(engine):
    """Check that counters say what the engine was told, and that no answer was one too many."""
    connector = engine.connector
    told = sum(connector._manager.figures.hit_tokens.values())
    assert told == engine.told, f"{told} loaded tokens are counted, and {engine.told} were told"
    events = connector.stats()["events"]
    assert not events["unexpected_completion"] + events["unexpected_release"], events


def is_within(engine):
    """Whether each store has at most what it may have, by its own figures."""
    for tier in engine.connector._spec.io.tiers.values():
        usage = tier.usage
        if usage is not None and usage.capacity_bytes is not None:
            is_redis = any(gauge.endswith("connections") for gauge in usage.gauges)
            most = usage.capacity_bytes + (_BUFFERS_BYTES if is_redis else 0)
            if usage.resident_bytes > most:
                return False
    return True


def check_shares(engine):
    """Check what each tier keeps of host memory, counted from the client's jobs, late ones too."""
    spec, client = engine.connector._spec, engine.connector._spec.io
    half = spec.num_slots * spec.slot_bytes // 2
    share = -(-spec.num_slots // 2 // len(client.tiers) or 1) * spec.slot_bytes
    late = list(client._jobs.late.values())
    jobs = [*list(client._jobs.unanswered.values()), *late]
    for name in client.tiers:
        of_tier = [job for job in jobs if job.order.tier == name]
        stores = [_slots(job.order) for job in of_tier if isinstance(job.order, Store)]
        loads = _loads([job for job in of_tier if not isinstance(job.order, Store)])
        kept, most = _kept(stores), share + max(map(_largest, stores), default=0)
        assert kept <= most, f"stores on {name} keep {kept} bytes of host memory, not {most}"
        kept, most = _kept(loads), half + max(map(_bytes, loads), default=0)
        assert kept <= most, f"loads from {name} keep {kept} bytes of host memory, not {most}"


def _loads(jobs):
    """The slots of each load: its chunks take turns in them, so it may have several jobs."""
    loads = defaultdict(dict)
    for job in jobs:
        loads[getattr(job.listener, "_load", job)] |= _slots(job.order)  # early reads have one
    return list(loads.values())


def _slots(order):
    """The slots of a job, with the bytes that it uses of each."""
    sizes = [order.sizes] * len(order.slots) if isinstance(order.sizes, int) else order.sizes
    return dict(zip(order.slots, sizes, strict=True))


def _kept(jobs):
    return sum({slot: size for job in jobs for slot, size in job.items()}.values())


def _bytes(job):
    return sum(job.values())


def _largest(job):
    return max(job.values())


class Held:
    """Descriptors, threads and children of this process: never more than at the first rest.

    Each store opens the files of segments that appear: each twice, and of all a bounded number.
    A folder tier starts each of its threads for calls when so many calls are first made at once,
    and one of Redis asks who has which keys when a server first fails.
    """

    def __init__(self):
        self._first = None
        self._names = None

    def check(self):
        until_s = time.monotonic() + REST_S
        while True:
            now = self._now()
            if self._first is None:
                self._first, self._names = now, _names()
            is_bounded = all(a <= b for a, b in zip(now, self._first, strict=True))
            are_few = _are_few(_in_segments(_files()))
            if is_bounded and are_few and _are_once_a_server(_late_threads()):
                return
            assert time.monotonic() < until_s, f"{now} {_names()} after {self._first} {self._names}"
            time.sleep(0.05)

    def _now(self):
        gc.collect()  # what was closed may be part of a cycle, and hold a mapping
        me = psutil.Process()
        num_threads, files = me.num_threads() - len(_late_threads()), _files()
        # Of one listing: a file of segments may be opened meanwhile.
        return len(files) - len(_in_segments(files)), num_threads, len(me.children())


def _late_threads():
    return [thread.name for thread in threading.enumerate() if thread.name in _LATE_THREADS]


def _num_servers():
    """The I/O servers of this process: each has one store of a tier."""
    return sum(thread.name == "kvoffload-io" for thread in threading.enumerate())


def _in_segments(files):
    return [name for name in files if name.endswith((".table", ".slots"))]


def _are_few(in_segments):
    roots, stores = Counter(name.rsplit("/", 3)[0] for name in in_segments), _num_servers()
    each, of_root = max(Counter(in_segments).values(), default=0), max(roots.values(), default=0)
    return each <= 2 * stores and of_root <= stores * (MOST_KEPT + MOST_SIZES)


def _are_once_a_server(names):
    return max(Counter(names).values(), default=0) <= _num_servers()


def _names():
    threads = sorted(thread.name for thread in threading.enumerate())
    return threads, _files()


def _files():
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            names.append(os.readlink(link))
    return sorted(names)


def chunk_bytes(root):
    """Bytes that the chunks of a disk tier take up."""
    return sum(chunk.allocated_bytes for chunk in stored_in(root))


def has_room(root, most_bytes):
    """Whether a disk tier has at most what its processes agreed on, which they record."""
    with contextlib.suppress(ValueError):
        if limits := read_limits(Vfs(), str(root)):
            return chunk_bytes(root) <= limits.capacity_bytes <= most_bytes
    return chunk_bytes(root) <= most_bytes  # an engine records them again


def plain_chunks(root):
    """Chunks in files of an encrypted tier that are not encrypted: the model's have a period."""
    return [chunk for chunk in stored_in(root) if _is_plain(chunk)]


def _is_plain(chunk):
    try:
        end = chunk.content()[-256:]
    except FileNotFoundError:  # evicted since
        return False
    return any(end[:PERIOD]) and end[:PERIOD] == end[PERIOD : 2 * PERIOD]


def lent_bytes(engine):
    """Bytes of a server's memory that are on loan."""
    tier = engine.connector._spec.io.tiers.get("serve")
    usage = tier and tier.usage
    return dict(usage.gauges).get("memory_lent_bytes", 0) if usage else 0


def spared_by_hostile(folder):
    """What the hostile tier was told last that requests need."""
    path = folder / "hostile" / "told"
    return json.loads(path.read_text())[0] if path.exists() else []


def open_disks():
    """The disk stores that this process has open."""
    return [disk._store for disk in Rough.opened if not disk.is_closed]


def left_in(store):
    """All that a disk store holds only while something is in flight, by name."""
    index = store.index
    tenants = index._tenants.of.keys() if index._tenants else set()
    found = {
        "bytes in flight": store.space.in_flight_bytes,
        "stores that wait": store.space._waiting,
        "spared": len(index._spared) + len(index.needed),
        "tenants of no chunk": len(tenants - index._sizes.keys()),
    }
    return {name: number for name, number in found.items() if number}


def figures(store):
    """The bytes that a disk store counts, and those of its chunks; stuck slots are freed first."""
    store.segments.clean_up()
    counted = store.root.quota.refresh()
    return counted, chunk_bytes(store.path) + _quarantined_bytes(store.path)


def is_exact(store):
    """Whether the figure is right; with several stores it may be too high until the next recount.

    A store that closes while a call of another one hangs with the lock cannot release any more.
    """
    counted, there = figures(store)
    may_be_higher = store.root.other_writers and counted is not None
    return counted >= there if may_be_higher else counted == there


def _quarantined_bytes(root):
    files = [path for path in Path(root, ".quarantine").rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


def violations(root):
    """What a hostile tier has seen that must not be."""
    path = Path(root, "violations")
    return path.read_text() if path.exists() else ""


def left_threads():
    """Threads of ours, which end with the connector."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("kvoffload")]
