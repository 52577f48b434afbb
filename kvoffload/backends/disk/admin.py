"""The operators' commands on a root: examined from outside, without opening a backend on it."""

import mmap
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvoffload.backends.admin import (
    Admin,
    Collected,
    Finding,
    Garbage,
    Holding,
    Overview,
    Verified,
    counted,
    duration,
    is_digest,
    named,
)
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.disk.doctor import diagnose
from kvoffload.backends.disk.inspector import ChunkFile, DiskInspector
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.config import convert, human_bytes

AGES = (("1 min", 60), ("1 hour", 3600), ("1 day", 86400), ("1 week", 7 * 86400))
_PIECE_BYTES = 4 << 20


class DiskAdmin(Admin):
    """A root, examined by an operator. Only ``collect`` and a repair change what is stored."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Touch nothing yet; ``options`` are those of the backend, as they were given.

        Raises:
            ConfigError: an option is wrong.
        """
        self._root: str = convert(dict(options), DiskOptions).root
        self._given = {name: value for name, value in options.items() if name != "root"}

    async def survey(self) -> list[Holding]:
        return [
            _holding(each) for each in await run_once(lambda: namespaces(DiskInspector(self._root)))
        ]

    async def overview(self, held: Sequence[Holding]) -> Overview:
        report = await run_once(lambda: overview(DiskInspector(self._root)))
        report["allocated_bytes"] = sum(each.stored_bytes for each in held)
        booked, capacity = report["ledger_bytes"], report["capacity_bytes"]
        owner = "one of them evicts" if report["owner"] else "nobody evicts"
        sizes = (
            f"allocated by chunks: {human_bytes(report['allocated_bytes'])}, in the ledger: "
            f"{report['ledger_fault'] if booked is None else human_bytes(booked)}, "
            f"capacity: {'not recorded' if capacity is None else human_bytes(capacity)}, "
            f"set aside as damaged: {len(report['quarantined'])} files"
        )
        lines = [(report["root"], f"{report['processes']} open, {owner}"), ("", sizes)]
        return Overview(report, lines, "last used")

    async def collect(self, wanted: Garbage) -> Collected:
        report = await run_once(lambda: collect(DiskInspector(self._root), wanted))
        summary = (
            f"{counted(report['removed'], 'chunk')}, "
            f"{report['quarantined']} damaged files set aside, "
            f"{report['leftovers']} leftovers of dead processes: "
            f"{human_bytes(report['freed_bytes'])}; {report['kept']} chunks stay, "
            f"{human_bytes(report['kept_bytes'])}"
        )
        return Collected(
            summary,
            report,
            [
                f"{each['kind']} {human_bytes(each['bytes'])} {each['path']}"
                for each in report["going"]
            ],
            [f"{each['path']} ({each['why']})" for each in report["not_removed"]],
        )

    async def verify(
        self,
        *,
        repair: bool,
        share: float | None,
        bytes_per_s: int | None,
        progress: Callable[[int, int], None],
    ) -> Verified:
        def run() -> dict[str, Any]:
            found = DiskInspector(self._root)
            if repair:
                found.require_write()
            return verify(
                found, repair=repair, share=share, bytes_per_s=bytes_per_s, progress=progress
            )

        report = await run_once(run)
        faults = report["damaged"] or report["ledger_fault"] or report["limits_fault"]
        return Verified(_lines(report), report, not faults)

    async def diagnose(self) -> list[Finding]:
        return await diagnose(self._root, self._given)


def namespaces(found: DiskInspector) -> list[dict[str, Any]]:
    """Return the figures of each namespace."""
    return [_namespace(found, name, time.time()) for name in found.namespaces()]


def overview(found: DiskInspector) -> dict[str, Any]:
    """Return the figures of the root alone."""
    return {
        "root": found.root,
        "processes": found.processes(),
        "owner": found.has_owner(),
        "ledger_bytes": found.booked_bytes(),
        "ledger_fault": found.ledger_fault(),
        "capacity_bytes": found.capacity_bytes(),
        "quarantined": found.quarantined(),
    }


def _namespace(found: DiskInspector, name: str, now: float) -> dict[str, Any]:
    manifest = found.manifest(name)
    count = allocated = 0
    oldest = newest = last_used = None
    used = dict.fromkeys([label for label, _ in AGES], 0)
    for chunk in found.chunks(name):
        count += 1
        allocated += chunk.allocated_bytes
        stored_s, used_s = now - chunk.stored_ns / 1e9, now - chunk.used_ns / 1e9
        oldest = stored_s if oldest is None else max(oldest, stored_s)
        newest = stored_s if newest is None else min(newest, stored_s)
        last_used = used_s if last_used is None else min(last_used, used_s)
        for label, seconds in AGES:
            used[label] += used_s <= seconds
    return {
        "folder": name,
        "namespace": manifest.get("namespace"),
        "facts": manifest.get("facts", {}),
        "chunks": count,
        "allocated_bytes": allocated,
        "oldest_s": oldest,
        "newest_s": newest,
        "last_used_s": last_used,
        "used_within": used,
    }


def _holding(each: dict[str, Any]) -> Holding:
    name = each["namespace"]
    # A digest of facts is shown by its folder, which damaged facts and older versions leave alone.
    is_name = isinstance(name, str) and name != "" and not is_digest(name)
    return Holding(
        name if is_name else each["folder"],
        # A namespace that was opened by its name has no facts behind it.
        each["facts"] or ({"namespace": name} if name else {}),
        each["chunks"],
        each["allocated_bytes"],
        used_s=each["last_used_s"],
        figures=each,
        details=[f"folder {each['folder']}", *_ages(each)],
    )


def _ages(each: dict[str, Any]) -> list[str]:
    if not each["chunks"]:
        return ["0 chunks"]
    within = ", ".join(f"{label}: {count}" for label, count in each["used_within"].items())
    oldest, newest = (duration(each[field]) for field in ("oldest_s", "newest_s"))
    return [f"stored {oldest} to {newest} ago", f"used within {within}"]


def collect(found: DiskInspector, wanted: Garbage) -> dict[str, Any]:
    """Remove the chunks that the limits name, damaged files, and leftovers of dead processes."""
    namespace, age_s, limit, dry_run = wanted
    folder = None if namespace is None else _folder(found, namespace)
    if not dry_run:
        found.require_write()
    chunks = sorted(found.chunks(folder), key=lambda chunk: chunk.used_ns)
    everything = folder is not None and limit is None and age_s is None
    removal = _Removal(dry_run)
    for chunk in _going(chunks, limit=limit, age_s=age_s, everything=everything):
        removal.take("chunk", chunk.path, chunk.allocated_bytes, partial(found.remove, chunk))
    for path in found.quarantined():
        size = found.allocated_bytes(path)
        removal.take("damaged", path, size, partial(found.remove_quarantined, path))
    for each in found.leftovers():
        size = each.allocated_bytes
        removal.take("leftover", each.path, size, partial(found.remove_leftover, each))
    if everything and folder is not None and not dry_run:
        found.remove_namespace_folder(folder)
    removed = removal.counts["chunk"]
    left = sum(chunk.allocated_bytes for chunk in chunks) - removal.bytes["chunk"]
    return {
        "root": found.root,
        "dry_run": dry_run,
        "removed": removed,
        "quarantined": removal.counts["damaged"],
        "leftovers": removal.counts["leftover"],
        "freed_bytes": removal.bytes.total(),
        "kept": len(chunks) - removed,
        "kept_bytes": left,
        "going": removal.going if dry_run else [],
        "undeletable": len(removal.undeletable),
        "not_removed": removal.undeletable,
    }


class _Removal:
    """The things removed, counted alike in a dry run."""

    def __init__(self, dry_run: bool) -> None:
        self._dry_run = dry_run
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.going: list[dict[str, Any]] = []
        self.undeletable: list[dict[str, str]] = []

    def take(self, kind: str, path: str, allocated_bytes: int, remove: Callable[[], int]) -> None:
        """Remove a thing, or record it; ``remove`` returns the bytes freed or raises OSError."""
        try:
            freed = allocated_bytes if self._dry_run else remove()
        except OSError as error:
            self.undeletable.append({"path": path, "why": error.strerror or str(error)})
            return
        self.counts[kind] += 1
        self.bytes[kind] += freed
        self.going.append({"kind": kind, "path": path, "bytes": allocated_bytes})


def _folder(found: DiskInspector, wanted: str) -> str:
    """Return the namespace's folder, by the namespace's name or the folder's, or its beginning."""
    folders = found.namespaces()
    own = [folder for folder in folders if found.manifest(folder).get("namespace") == wanted]
    return own[0] if len(own) == 1 else named(wanted, folders)


def _going(
    chunks: list[ChunkFile], *, limit: int | None, age_s: float | None, everything: bool
) -> Iterable[ChunkFile]:
    """Yield the chunks to remove; ``chunks`` are in order of their last use."""
    total = sum(chunk.allocated_bytes for chunk in chunks)
    now_ns = time.time_ns()
    for chunk in chunks:
        too_old = age_s is not None and now_ns - chunk.used_ns > age_s * 1e9
        too_much = limit is not None and total > limit
        if everything or too_old or too_much:
            total -= chunk.allocated_bytes
            yield chunk


def verify(
    found: DiskInspector,
    *,
    repair: bool,
    share: float | None = None,
    bytes_per_s: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Check every chunk, or a part; with ``repair`` remove the damaged ones."""
    everything = list(found.chunks())
    chunks = everything
    if share is not None and everything:
        chunks = random.sample(everything, max(1, round(len(everything) * share)))
    buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    damaged: list[dict[str, Any]] = [
        {"path": folder, "reason": why, "removed": False, "why": "cannot be listed"}
        for folder, why in found.unreadable
    ]
    read_bytes = passed_bytes = gone = 0
    total_bytes = sum(chunk.allocated_bytes for chunk in chunks)
    began = time.monotonic()
    for chunk in chunks:
        reason, read = found.verify(chunk, buffer)
        read_bytes += read
        passed_bytes += chunk.allocated_bytes
        progress(passed_bytes, total_bytes)
        if reason == "missing":
            gone += 1  # evicted since it was listed
        elif reason is not None:
            repaired = _repaired(found, chunk, repair)
            damaged.append({"path": chunk.path, "reason": reason, **repaired})
        if bytes_per_s is not None:
            time.sleep(max(0.0, read_bytes / bytes_per_s - (time.monotonic() - began)))
    seconds = time.monotonic() - began
    return {
        "root": found.root,
        "chunks": len(chunks) - gone,
        "of_chunks": len(everything),
        "bytes": read_bytes,
        "seconds": seconds,
        "bytes_per_second": read_bytes / seconds if seconds else 0.0,
        "reasons": dict(Counter(each["reason"] for each in damaged)),
        "damaged": damaged,
        "ledger_fault": found.ledger_fault(),
        "limits_fault": found.limits_fault(),
        "strays": found.strays(),
        "leftovers": [each._asdict() for each in found.leftovers()],
    }


def _repaired(found: DiskInspector, chunk: ChunkFile, repair: bool) -> dict[str, Any]:
    """Remove a damaged chunk, if asked; return whether it was removed, and why not."""
    if not repair:
        return {"removed": False, "why": "left in place"}
    try:
        found.remove(chunk)
    except IsADirectoryError:
        return {"removed": False, "why": "left in place: a folder, remove it by hand"}
    except OSError as error:
        return {"removed": False, "why": f"left in place: {error.strerror}"}
    return {"removed": True, "why": "removed"}


def _lines(report: dict[str, Any]) -> list[str]:
    """Return the report for people, each path on a line of its own."""
    lines = [
        f"{counted(report['chunks'], 'chunk')}, {human_bytes(report['bytes'])} read in "
        f"{report['seconds']:.1f} s ({human_bytes(report['bytes_per_second'])}/s), "
        f"{len(report['damaged'])} damaged"
    ]
    if report["chunks"] < report["of_chunks"]:
        lines.append(f"a part of {report['of_chunks']} chunks")
    lines += [f"{each['reason']}: {each['path']} ({each['why']})" for each in report["damaged"]]
    if report["ledger_fault"]:
        lines.append(
            f"ledger {report['ledger_fault']}: an engine counts everything and sets it right"
        )
    if report["limits_fault"]:
        lines.append(f"limits unusable: {report['limits_fault']}; an engine replaces them")
    lines += [f"not of this store: {path}" for path in report["strays"]]
    return lines + [
        f"leftover of a dead process: {each['path']} ({human_bytes(each['allocated_bytes'])})"
        for each in report["leftovers"]
    ]
