"""The operators' commands on a root: examined from outside, without opening a backend on it."""

import math
import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeVar

from kvoffload.backends.admin import (
    Check,
    Collected,
    Finding,
    Garbage,
    Holding,
    Survey,
    Verified,
    counted,
    duration,
    named,
)
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.doctor import diagnose
from kvoffload.backends.disk.inspector import Chunk, DiskInspector, Waste, inspected
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.key_files import read_encryption, without
from kvoffload.backends.seals import Seal, is_of
from kvoffload.backends.verification import Verification
from kvoffload.config import convert, human_bytes

AGES = (("1 min", 60), ("1 hour", 3600), ("1 day", 86400), ("1 week", 7 * 86400))
_PIECE_BYTES = 4 << 20
T = TypeVar("T")


class DiskAdmin:
    """A root, examined by an operator. Only ``collect`` and a repair change what is stored."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Touch nothing yet; ConfigError: an option of the backend is wrong."""
        self._root: str = convert(without(options), DiskOptions).root
        self._given = {name: value for name, value in options.items() if name != "root"}
        self._cipher = read_encryption(options)

    async def close(self) -> None:
        """Do nothing: each call opens the root by itself."""

    def _work(self, work: Callable[[DiskInspector], T]) -> T:
        with inspected(self._root) as found:
            return work(found)

    async def survey(self) -> Survey:
        return await run_once(self._work, survey)

    async def collect(self, wanted: Garbage) -> Collected:
        return await run_once(self._work, lambda found: collect(found, wanted))

    async def erase(self, tenant: bytes, wanted: Garbage) -> Collected:
        return await run_once(
            self._work, lambda found: collect(found, wanted, (tenant, self._cipher))
        )

    async def verify(self, wanted: Check) -> Verified:
        return await run_once(self._work, lambda found: verify(found, wanted, self._cipher))

    async def diagnose(self) -> list[Finding]:
        return await diagnose(self._root, self._given)


# ---- inspect -------------------------------------------------------------------------------------


def survey(found: DiskInspector) -> Survey:
    """Return the state of the root, and the chunks of each namespace with their ages."""
    held = [_holding(found, folder, time.time()) for folder in found.namespaces()]
    counted_bytes, fault = found.ledger()
    capacity_bytes, _ = found.capacity()
    figures: dict[str, Any] = {
        "root": found.root,
        "processes": found.processes(),
        "owner": found.has_owner(),
        "ledger_bytes": counted_bytes,
        "ledger_fault": fault,
        "capacity_bytes": capacity_bytes,
        "quarantined": [each.path for each in found.quarantined()],
        "allocated_bytes": sum(each.stored_bytes for each in held),
    }
    owner = "one of them evicts" if figures["owner"] else "none evicts"
    sizes = (
        f"allocated by chunks: {human_bytes(figures['allocated_bytes'])}, counted by engines: "
        f"{fault if counted_bytes is None else human_bytes(counted_bytes)}, "
        f"capacity: {human_bytes(capacity_bytes) if capacity_bytes else 'not recorded'}, "
        f"set aside as damaged: {len(figures['quarantined'])} files"
    )
    processes = f"processes that have it open: {figures['processes']}, {owner}"
    return Survey(held, figures, [(found.root, processes), ("", sizes)], "last used")


def _holding(found: DiskInspector, folder: str, now: float) -> Holding:
    told, chunks = found.manifest(folder), list(found.chunks(folder))
    name, facts = told.get("namespace"), told.get("facts")
    facts = facts if isinstance(facts, dict) else {}
    stored_s = [now - chunk.stored_ns / 1e9 for chunk in chunks]
    used_s = [now - chunk.used_ns / 1e9 for chunk in chunks]
    within = {label: sum(each <= age_s for each in used_s) for label, age_s in AGES}
    figures: dict[str, Any] = {
        "folder": folder,
        "namespace": name,
        "facts": facts,
        "chunks": len(chunks),
        "allocated_bytes": sum(chunk.allocated_bytes for chunk in chunks),
        "oldest_s": max(stored_s, default=None),
        "newest_s": min(stored_s, default=None),
        "last_used_s": min(used_s, default=None),
        "used_within": within,
    }
    ages = ["0 chunks"]
    if chunks:
        ages = [
            f"stored {duration(max(stored_s))} to {duration(min(stored_s))} ago",
            f"used within {', '.join(f'{label}: {count}' for label, count in within.items())}",
        ]
    return Holding(
        manifest.name_in(told, folder),
        # A namespace that was opened by its name has no facts behind it.
        facts or ({"namespace": name} if name else {}),
        len(chunks),
        figures["allocated_bytes"],
        used_s=figures["last_used_s"],
        figures=figures,
        details=[f"folder {folder}", *ages],
    )


# ---- gc ------------------------------------------------------------------------------------------


def collect(
    found: DiskInspector,
    wanted: Garbage,
    whose: tuple[bytes, Seal | None] | None = None,
) -> Collected:
    """Remove the chunks that are asked for, damaged files, and leftovers of dead processes.

    ``whose``: only chunks of this tenant, with what decrypts the engines' chunks.
    """
    namespace, age_s, dry_run = wanted
    folder = None if namespace is None else _folder(found, namespace)
    chunks = sorted(found.chunks(folder), key=lambda chunk: chunk.used_ns)
    everything = (folder is not None or whose is not None) and age_s is None
    until_ns = -math.inf if age_s is None else time.time_ns() - age_s * 1e9
    old = [chunk for chunk in chunks if everything or chunk.used_ns < until_ns]
    unknown = 0
    if whose is not None:
        verdicts = [is_of(found.header(chunk), *whose) for chunk in old]
        unknown = sum(verdict is None for verdict in verdicts)
        old = list(compress(old, verdicts))
    garbage: list[tuple[str, Chunk | Waste, Callable[[Any], int]]] = [
        *(("chunk", chunk, found.remove) for chunk in old),
        *(("damaged", file, lambda file: found.unlink(*file)) for file in found.quarantined()),
        *(("leftover", inner, found.remove_leftover) for inner in found.leftovers()),
    ]
    going, failed, freed = [], [], Counter[str]()
    for kind, each, remove in garbage:
        try:
            freed[kind] += each.allocated_bytes if dry_run else remove(each)
            going.append({"kind": kind, "path": each.path, "bytes": each.allocated_bytes})
        except OSError as error:
            failed.append({"path": each.path, "why": error.strerror or str(error)})
    if everything and folder is not None and whose is None and not dry_run:
        found.remove_namespace_folder(folder)
    number = Counter(str(each["kind"]) for each in going)
    kept = len(chunks) - number["chunk"]
    kept_bytes = sum(chunk.allocated_bytes for chunk in chunks) - freed["chunk"]
    figures: dict[str, Any] = {
        "root": found.root,
        "dry_run": dry_run,
        "removed": number["chunk"],
        "quarantined": number["damaged"],
        "leftovers": number["leftover"],
        "freed_bytes": freed.total(),
        "kept": kept,
        "kept_bytes": kept_bytes,
        "going": going if dry_run else [],
        "undeletable": len(failed),
        "not_removed": failed,
    }
    if whose is not None:
        figures["unknown"] = unknown
    summary = (
        f"{counted(number['chunk'], 'chunk')}, {number['damaged']} damaged files set aside, "
        f"{number['leftover']} leftovers of dead processes: {human_bytes(freed.total())}; "
        f"{kept} chunks stay, {human_bytes(kept_bytes)}"
    )
    if unknown:
        summary += f"; of {unknown} of them it is not known whose they are"
    shown = [f"{kind} {human_bytes(each.allocated_bytes)} {each.path}" for kind, each, _ in garbage]
    return Collected(summary, figures, shown if dry_run else [], [*_by_reason(failed)])


def _by_reason(failed: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each reason: a read-only file system keeps every chunk for the same one."""
    for why, count in Counter(each["why"] for each in failed).items():
        path = next(each["path"] for each in failed if each["why"] == why)
        more = f", and {count - 1} more: --json lists them" if count > 1 else ""
        yield f"{path} ({why}){more}"


def _folder(found: DiskInspector, wanted: str) -> str:
    """Return the namespace's folder, by the namespace's name or the folder's, or its beginning."""
    folders = {folder: folder for folder in found.namespaces()}
    names = {manifest.name_in(found.manifest(folder), folder): folder for folder in folders}
    known = folders | names
    return known[named(wanted, known)]


# ---- verify --------------------------------------------------------------------------------------


def verify(found: DiskInspector, wanted: Check, cipher: Seal | None = None) -> Verified:
    """Check every chunk, or a part; remove the damaged ones if asked.

    Of a chunk that loads with ``cipher`` do not take, only the header is checked.
    """
    buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    run = Verification(list(found.chunks()), wanted, lambda chunk: chunk.allocated_bytes)
    for folder, reason in found.unreadable:
        run.add_damage(folder, reason, "cannot be listed")
    for chunk in run.chosen:
        fault, read_bytes = found.verify(chunk, buffer, cipher)
        remove = partial(_why_not_removed, found, chunk)
        time.sleep(run.judge(chunk, chunk.path, fault, read_bytes, remove))
    faults = {"ledger_fault": found.ledger()[1], "limits_fault": found.capacity()[1]}
    strays, leftovers = list(found.strays()), found.leftovers()
    lines = []
    if fault := faults["ledger_fault"]:
        lines.append(f"ledger {fault}: an engine counts everything and sets it right")
    if fault := faults["limits_fault"]:
        lines.append(f"limits unusable: {fault}; an engine replaces them")
    lines += [f"not of this store: {path}" for path in strays]
    lines += [
        f"leftover of a dead process: {path} ({human_bytes(size)})" for path, size in leftovers
    ]
    told = {"strays": strays, "leftovers": [each._asdict() for each in leftovers]}
    is_sound = not any(faults.values())
    return run.report(lines, is_sound=is_sound, root=found.root, **faults, **told)


def _why_not_removed(found: DiskInspector, chunk: Chunk) -> str:
    """Remove a damaged chunk; return why it stays, or nothing."""
    try:
        found.remove(chunk)
    except IsADirectoryError:
        return "left in place: a folder, remove it by hand"
    except OSError as error:
        return f"left in place: {error.strerror}"
    return ""
