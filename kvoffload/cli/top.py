"""``kvoffload top``: what an engine's tiers do now, or how full a store is."""

import json
import math
import re
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from kvoffload.backends.admin import Surveys, counted
from kvoffload.cli.output import console, fail, plain, say, table_of
from kvoffload.cli.stores import AsJson, Settings, run_on
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.metrics import names
from kvoffload.metrics.names import page_name

TIMEOUT_S = 5.0
LARGEST = 8 << 20
"""Bytes of a page of metrics that are read at most."""
_PIECE_BYTES = 64 << 10
LONGEST_LINE = 4096
"""Characters of a line; a longer one is left out."""
MOST_TIERS = 64
MOST_ENGINES = 1024
_SERIES = re.compile(r"(?:vllm:)?(kvoffload_\w+)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'\b(\w++)="((?:[^"\\]|\\.)*+)"')
_PORT = re.compile(r"[\w.-]+:\d+(?:/.*)?|\[[\da-fA-F:.]+\]:\d+(?:/.*)?")
COLUMNS = {
    "hit_tokens": "hit tokens",
    "load_bytes": "loaded",
    "store_bytes": "stored",
    "evictions": "evicted",
    "dropped": "dropped",
    "corrupt": "corrupt",
}
"""Counter of a tier → its title."""
EVENTS, UP = page_name(names.TIER_EVENTS), page_name(names.TIER_UP)
_TROUBLE = re.compile(
    r"refused_.*|.*_lost_.*|.*_failed|(read|write|lookup)_(io_.*|full|late|no_server|stalled|unsafe)"
)
"""Events of a tier that say why it is away, or does not store or load."""
_MOST_REASONS = 3
LOOKUPS = page_name(names.LOOKUPS)
HITS, ALL = "lookups that hit", "lookups of all tiers"
"""What is summed up of it: for each tier, and for the engine."""
OF_TIERS = {
    **{page_name(name): name for name in (
        names.HIT_TOKENS, names.LOAD_BYTES, names.STORE_BYTES, names.EVICTIONS,
        names.RESIDENT_BYTES, names.CAPACITY_BYTES, names.INFLIGHT_BYTES, names.WAITING_CHUNKS,
        names.BREAKERS_OPEN,
    )},
    page_name(names.STORES_DROPPED): "dropped",
    page_name(names.CORRUPT_CHUNKS): "corrupt",
    UP: "up",
    page_name(names.LOAD_SECONDS) + "_count": "loads",
    page_name(names.LOAD_SECONDS) + "_sum": "load_seconds",
    HITS: "lookup_hits",
}  # fmt: skip
"""Metric of a tier → its name here."""
OF_ENGINE = {
    ALL: "lookups",
    **{page_name(name): name for name in (
        names.SAVED_PREFILL_TOKENS, names.IO_RESTARTS, names.TRANSFER_FAILURES,
        names.QUEUE_REQUESTS, names.QUEUE_KEPT_BYTES, names.ENGINES,
        names.ENGINES_LEAVING,
    )},
}  # fmt: skip
OF_ATTACHED = {
    page_name(names.ENGINE_LOAD_BYTES): "load_bytes",
    page_name(names.ENGINE_STORE_BYTES): "store_bytes",
}
"""Metric of an engine at the server of its host → its name here."""


@dataclass
class Reading:
    """Figures at one moment, since the engine's start."""

    when_s: float = field(default_factory=time.monotonic)
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    attached: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of a server: its engines, by their processes."""
    notes: list[str] = field(default_factory=list)
    """What a store says of itself, for people."""
    trouble: dict[tuple[str, str], float] = field(default_factory=dict)
    """Events of tiers that are faults, by tier and reason."""
    engines: Counter[str] = field(default_factory=Counter)
    """How many say of each tier whether it is up."""

    @property
    def plain(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        attached = {"attached": self.attached} if self.attached else {}
        return {"tiers": self.tiers, **attached, **self.totals}


def command(
    target: Annotated[
        str, typer.Argument(help="http://HOST:PORT of an engine's metrics; a folder, redis://...")
    ],
    option: Settings = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the figures since the start, and end.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two readings.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show tiers, fill, hits, traffic, evictions and faults, a second each. Changes nothing.

    Of a folder or a server it shows how full it is. Without a terminal it prints once. Control-C
    ends it.

    Exit codes: 0 done, 1 the target cannot be reached, 2 wrong usage or settings.
    """
    reading = _read(target, option)
    out = console()
    if as_json:
        print(json.dumps(reading.plain))
    elif once or not out.is_terminal:
        out.print(_shown(reading, None))
    else:
        _follow(target, option, reading, interval)


def _follow(target: str, option: list[str] | None, last: Reading, interval_s: float) -> None:
    with Live(_shown(last, None), console=console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    now = _read(target, option)
                except typer.Exit:
                    continue  # the reason is printed; the next reading may succeed
                except ConfigError as error:  # an engine that starts again has no metrics yet
                    say(f"kvoffload: {error}", stderr=True)
                    continue
                live.update(_shown(now, last), refresh=True)
                last = now
        except KeyboardInterrupt:
            return


# ---- reading ----


def _read(target: str, option: list[str] | None) -> Reading:
    """Read the figures of an engine or a store.

    Raises:
        ConfigError: the target is wrong.
        typer.Exit: with code 1 when it cannot be reached; the reason is printed.
    """
    if not target.startswith(("http://", "https://")):
        if _PORT.fullmatch(target) and not Path(target).exists():
            raise ConfigError("target", target, f"is no folder; did you mean http://{target}?")
        return run_on("inspect", target, None, option, _of_store)
    try:
        page = fetch(target)
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if type(error) is urllib.error.URLError else error
        if isinstance(reason, ConnectionRefusedError):
            reason = "nothing listens there; the port is vLLM's, or metrics_port of another engine"
        fail(f"{target} cannot be read: {reason}")
    reading = of_page(page)
    if not reading.tiers:
        raise ConfigError("target", target, "has no metric of kvoffload; is it the engine's port?")
    return reading


def fetch(url: str) -> str:
    """Return a page of metrics; without a path, that of ``/metrics``."""
    if urlsplit(url).path in ("", "/"):
        url = url.rstrip("/") + "/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page, until_s = bytearray(), time.monotonic() + TIMEOUT_S
    with opener.open(url, timeout=TIMEOUT_S) as answer:
        while piece := answer.read1(_PIECE_BYTES):
            page += piece
            if len(page) > LARGEST:
                raise ValueError(f"the page has more than {human_bytes(LARGEST)}")
            if time.monotonic() > until_s:
                raise TimeoutError(f"the page takes more than {TIMEOUT_S:.0f} s")
    return page.decode(errors="replace")


def of_page(page: str) -> Reading:
    """Read a page of metrics; engines of one page are added up.

    Raises:
        ConfigError: it has more tiers than any engine.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    attached: dict[str, dict[str, float]] = {}
    trouble, engines = defaultdict[tuple[str, str], float](float), Counter[str]()
    for name, labels, value in _series(page):
        if name in OF_ATTACHED:
            attached.setdefault(labels.get("engine", ""), {})[OF_ATTACHED[name]] = value
            continue
        tier = labels.get("tier", "")
        if name == EVENTS:
            if _TROUBLE.fullmatch(reason := labels.get("reason", "")):
                trouble[tier, reason] += value
            continue
        engines[tier] += name == UP
        sums[name, tier] += value
        if name == LOOKUPS:
            sums[ALL, ""] += value
            if labels.get("result") == "hit":
                sums[HITS, tier] += value
    reading = Reading(attached=attached, trouble=trouble, engines=engines)
    for (metric, tier), value in sums.items():
        if tier and metric in OF_TIERS:
            reading.tiers.setdefault(tier, {})[OF_TIERS[metric]] = value
        elif metric in OF_ENGINE:
            reading.totals[OF_ENGINE[metric]] = value
        if len(reading.tiers) > MOST_TIERS:
            raise ConfigError("target", "page", f"has more than {MOST_TIERS} tiers")
    if len(attached) > MOST_ENGINES:
        raise ConfigError("target", "page", f"has more than {MOST_ENGINES} engines")
    return reading


def _series(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in page.splitlines():
        if len(line) > LONGEST_LINE or not (match := _SERIES.fullmatch(line.strip())):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):  # JSON knows no other
            yield match[1], dict(_LABEL.findall(match[2] or "")), value


async def _of_store(store: Surveys) -> Reading:
    held, figures, lines, _ = await store.survey()
    tier = {
        "resident_bytes": float(sum(each.stored_bytes for each in held)),
        "chunks": float(sum(each.chunks for each in held)),
        "namespaces": float(len(held)),
    }
    if isinstance(capacity := figures.get("capacity_bytes"), int):
        tier["capacity_bytes"] = float(capacity)
    return Reading(tiers={"store": tier}, notes=[": ".join(filter(None, line)) for line in lines])


# ---- showing ----


def _shown(now: Reading, last: Reading | None) -> RenderableType:
    """Return tables of the figures: since the start, or a second since the last reading."""
    seconds = max(1e-6, now.when_s - last.when_s) if last else 1.0
    states: list[dict[str, str]] = []
    moves: list[Sequence[str]] = []
    # A worker's own page has no hits: the scheduler counts them.
    told = [name for name in COLUMNS if name != names.HIT_TOKENS or _has(now, name)]
    for name, tier in now.tiers.items():
        before = last.tiers.get(name, {}) if last else {}
        hits = _hits(now, last, tier, before)
        states.append(
            {"tier": name, "state": _state(tier, now.engines[name]), **hits, **_fill(tier)}
        )
        if any(column in tier for column in COLUMNS):
            grown = ((column, _grown(tier, before, column)) for column in told)
            moves.append((name, *(_number(column, value / seconds) for column, value in grown)))
    filled = [title for title in states[0] if any(row[title] for row in states)]
    rows = [[row[title] for title in filled] for row in states]
    numbers = [title for title in filled if title not in ("tier", "state")]
    parts: list[RenderableType] = [table_of(filled, rows, numbers=numbers)]
    if moves:
        numbers = [f"{COLUMNS[name]}/s" if last else COLUMNS[name] for name in told]
        parts.append(table_of(["tier", *numbers], moves, numbers=numbers))
    if now.attached:
        parts.append(_attached(now, last, seconds))
    parts += [plain(line) for line in (*_reasons(now, last), *_lines(now), *now.notes)]
    return Group(*parts)


def _has(now: Reading, name: str) -> bool:
    return any(name in tier for tier in now.tiers.values())


def _attached(now: Reading, last: Reading | None, seconds: float) -> RenderableType:
    """Return the table of a server's engines: what each has loaded and stored."""
    rows = []
    for pid, moved in sorted(now.attached.items()):
        before = last.attached.get(pid, {}) if last else {}
        cells = [
            human_bytes(_grown(moved, before, name) / seconds) for name in OF_ATTACHED.values()
        ]
        rows.append([pid, *cells])
    titles = [f"{title}/s" if last else title for title in ("loaded", "stored")]
    return table_of(["engine", *titles], rows, numbers=titles)


def _grown(after: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    """Return by how much a counter rose; one begins at zero when an engine starts again."""
    return max(0.0, after.get(name, 0.0) - before.get(name, 0.0))


def _hits(
    now: Reading, last: Reading | None, tier: Mapping[str, float], before: Mapping[str, float]
) -> dict[str, str]:
    """Return the share of lookups that the tier answered, and how long a batch of loads takes."""
    lookups = _grown(now.totals, last.totals if last else {}, "lookups")
    loads = _grown(tier, before, "loads")
    share, load_s = _grown(tier, before, "lookup_hits"), _grown(tier, before, "load_seconds")
    return {
        "hits": f"{share / lookups:.0%}" if lookups else "",
        "a load": f"{load_s / loads * 1000:,.1f} ms" if loads else "",
    }


def _state(tier: Mapping[str, float], engines: int) -> str:
    if "up" not in tier:
        return ""
    if not tier["up"]:
        return "DOWN"
    if tier["up"] < engines:
        return f"DOWN in {engines - tier['up']:.0f} of {engines}"
    return "breaker open" if tier.get("breakers_open") else "up"


def _fill(tier: Mapping[str, float]) -> dict[str, str]:
    resident, capacity = tier.get("resident_bytes"), tier.get("capacity_bytes")
    full = f"{resident / capacity:.0%}" if capacity and resident is not None else ""
    waiting = f"{tier['waiting_chunks']:,.0f}" if "waiting_chunks" in tier else ""
    sizes = ["" if size is None else human_bytes(size) for size in (resident, capacity)]
    return {"resident": sizes[0], "capacity": sizes[1], "full": full, "waiting": waiting}


def _number(column: str, value: float) -> str:
    return human_bytes(value) if column.endswith("_bytes") else f"{value:,.0f}"


def _reasons(now: Reading, last: Reading | None) -> Iterator[str]:
    """Yield why tiers are away, or refuse: what they counted since the last reading."""
    grown = defaultdict[str, Counter[str]](Counter)
    for (name, reason), count in now.trouble.items():
        before = last.trouble.get((name, reason), 0.0) if last else 0.0
        grown[name] += Counter({reason: int(max(0.0, count - before))})
    for name, tier in now.tiers.items():
        if reasons := grown[name].most_common(_MOST_REASONS):
            yield f"{name}: {', '.join(f'{reason} {times:,}' for reason, times in reasons)}"
        elif tier.get("up", 1.0) < now.engines[name]:
            yield f"{name}: the engine's log says why it is down; kvoffload doctor examines it"


def _lines(now: Reading) -> Iterator[str]:
    totals, tiers = now.totals, now.tiers.values()
    if "saved_prefill_tokens" in totals:
        yield f"{totals['saved_prefill_tokens']:,.0f} tokens were loaded instead of computed"
    if requests := totals.get("queue_requests"):
        kept = human_bytes(totals.get("queue_kept_bytes", 0.0))
        yield f"{counted(int(requests), 'request')} in the queue: {kept} of host memory are kept"
    if leaving := totals.get("engines_leaving"):
        yield f"{counted(int(leaving), 'engine')} left while a store's call uses its memory"
    if totals.get("io_restarts"):
        yield f"lost its I/O process or server {counted(int(totals['io_restarts']), 'time')}"
    if totals.get("transfer_failures"):
        yield f"transfers of {counted(int(totals['transfer_failures']), 'chunk')} failed"
    for tier in tiers:
        if "chunks" in tier:
            yield (
                f"{counted(int(tier['chunks']), 'chunk')} in "
                f"{counted(int(tier['namespaces']), 'namespace')}"
            )
