"""Promises of loads: a lookup promises chunks of a tier that arrive in time, and are worth it.

A load is declined if it would begin too late, or would take longer than computing its tokens. Both
follow from measured times and from what the tier has yet to load. Unknown times decline nothing.
A load waits while what the tier has yet to load fills too much of host memory.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvoffload.messages import CPULoadStoreSpec, Fetch, OffloadKey
from kvoffload.metrics.names import PREFILL_RATE
from kvoffload.metrics.samples import Sample
from kvoffload.offload.base import LoadJob, Read, ReqContext
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import Presence, Tier, first_holder

TOO_SLOW = "too_slow"
"""Loading takes longer than computing."""
NOT_IN_TIME = "not_in_time"
"""The first chunk would arrive after ``load_timeout_s``, or late reads keep too much memory."""
_RESULTS = {TOO_SLOW: "declined", NOT_IN_TIME: "not_in_time"}
FORGET_PER_SAMPLE = 0.8
"""Weight of the earlier samples of a rate at each new sample."""
MIN_SAMPLES = 4
"""Samples before a rate counts as known."""
LEAST_S = 0.1
"""A load that takes no longer than this is worth it, however fast the engine computes."""
LATE_S = 0.5
"""A tier that is later than this with what it loads is taken to be as late again."""
PROBE_DECLINES = 16
PROBE_S = 10.0
"""A tier is tried again after so many declined requests, and so long after its last load."""
MAX_DECLINED = 4096
"""Requests whose declined tiers are remembered; more only if an engine never ends them."""


class Speed:
    """How fast a tier loads bytes, or the engine computes tokens, by the recent samples.

    A size takes a start and a time for each byte or token, fitted to the samples.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._weight = self._sizes = self._seconds = 0.0
        self._squares = self._products = 0.0
        self._largest = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Add a sample."""
        keep = FORGET_PER_SAMPLE
        self._samples += 1
        self._weight = self._weight * keep + 1
        self._sizes = self._sizes * keep + size
        self._seconds = self._seconds * keep + seconds
        self._squares = self._squares * keep + size * size
        self._products = self._products * keep + size * seconds
        self._largest = max(size, self._largest * keep)

    @property
    def per_s(self) -> float | None:
        """Bytes or tokens a second, large samples weighing more; None if it is not known."""
        if self._samples < MIN_SAMPLES or not self._seconds:
            return None
        return self._sizes / self._seconds

    def seconds(self, size: int) -> float | None:
        """Return how long a size takes; None if no recent sample tells, nor one half as large."""
        if self._samples < MIN_SAMPLES or not 0 < size <= 2 * self._largest:
            return None
        mean_size, mean_s = self._sizes / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_size**2
        slope = each_s = mean_s / mean_size
        if spread > 1e-6 * mean_size**2:
            slope = (self._products / self._weight - mean_size * mean_s) / spread
        return mean_s + min(max(slope, 0.0), each_s) * (size - mean_size)


@dataclass
class _TierLoads:
    """The loads of one tier."""

    speed: Speed = field(default_factory=Speed)
    in_flight: int = 0
    free_s: float = 0.0
    """When all that is in flight should have arrived."""
    queue_s: float = 0.0
    """What the loads in flight were expected to take, one after the other."""
    ended_s: float = -math.inf
    declines: int = 0
    """Requests declined since a load last began."""
    is_probing: bool = False
    """Whether the last load began to show if the tier has become faster."""
    answered_s: float = -math.inf
    """When a load last brought something."""
    flying_bytes: int = 0
    """Host memory that loads and early reads in flight keep."""
    late_bytes: int = 0
    """Host memory that answered loads and early reads keep: a late read may still write to it."""
    early_bytes: int = 0
    """What early reads keep of both: in flight, and late."""

    def wait_s(self, now_s: float) -> float:
        """Return how long a further load waits for those in flight."""
        if not self.in_flight:
            return 0.0
        late_s = now_s - self.free_s
        return late_s if late_s > LATE_S else max(0.0, -late_s)

    def is_to_probe(self, now_s: float) -> bool:
        """Whether the next load must show if the tier has become faster."""
        if self.in_flight or self.declines < PROBE_DECLINES:
            return False
        return now_s >= self.ended_s + PROBE_S


class _Full(Presence):
    """The presence of a tier that has enough to load: what it has, it may have later."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence

    def holds(self, key: bytes) -> bool | None:
        return False if self._presence.holds(key) is False else None

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget nothing: no load begins from such a tier."""


class Promises:
    """Measures the loads from all tiers, and declines tiers for requests.

    A declined tier stays declined for its request, so that the next lookup answers alike.

    Args:
        host: tells the sizes of chunks, and which are in host memory; its clock counts.
        tiers: returns the tiers that a request may load from.
        lookups: counts those that declined a tier, by tier and result.
        load_timeout_s: how long a load may wait for its first chunk.
        num_tiers: a tier's loads may keep an equal share of half of host memory; half, while it
            answers. The one load that goes beyond begins.
    """

    def __init__(
        self,
        host: HostCache,
        tiers: Callable[[ReqContext], tuple[Tier, ...]],
        lookups: Counter[tuple[str, str]],
        load_timeout_s: float,
        num_tiers: int,
    ) -> None:
        self._host = host
        self._tiers_of = tiers
        self._lookups = lookups
        self._prefill = Speed()
        self._load_timeout_s = load_timeout_s
        self._loads: defaultdict[str, _TierLoads] = defaultdict(_TierLoads)
        self._half = host.capacity_bytes // 2
        self.share_bytes = self._half // max(1, num_tiers)
        """Of host memory: what a tier that does not answer may keep."""
        self._declined: dict[str, dict[str, str]] = {}
        """Request → reason for each of its declined tiers."""

    # ---- what computing and loads take ----

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note how long the engine took to compute tokens of prompts."""
        if tokens and seconds > 0:
            self._prefill.add(tokens, seconds)

    def samples(self) -> Iterator[Sample]:
        """Yield the speed at which the engine computes prompts, if it is known."""
        if (tokens_per_s := self._prefill.per_s) is not None:
            yield PREFILL_RATE, (), tokens_per_s

    def begun(self, job: LoadJob) -> None:
        """Note a load that has begun."""
        now_s = self._host.now_s()
        for fetch in job.spec.fetches:
            loads = self._loads[fetch.tier]
            num_bytes = self._host.bytes_of_all(fetch.keys)
            seconds = loads.speed.seconds(num_bytes) or 0.0
            takes_turns = bool(self._host.turns)
            kept_bytes = self._kept(job.spec, fetch, {*fetch.keys}) if takes_turns else num_bytes
            job.reads[fetch.tier] = Read(num_bytes, seconds, kept_bytes)
            loads.flying_bytes += kept_bytes
            loads.is_probing = loads.is_to_probe(now_s)
            loads.free_s = max(now_s, loads.free_s) + seconds
            loads.queue_s += seconds
            loads.in_flight += 1
            loads.declines = 0

    def ended(self, job: LoadJob, late: Collection[OffloadKey] = ()) -> None:
        """Note that a load has ended, though late reads may still write to these chunks' slots.

        The job says how long it took. One that brought nothing tells nothing, nor does one that
        ended at its deadline.
        """
        now_s, arrived = self._host.now_s(), sum(job.ok) / max(1, len(job.ok))
        for name, (num_bytes, expected_s, kept_bytes) in job.reads.items():
            loads = self._loads[name]
            loads.in_flight -= 1
            loads.flying_bytes -= kept_bytes
            loads.queue_s -= expected_s
            loads.free_s = min(loads.free_s, now_s + loads.queue_s)
            # Loads that run at the same time share the tier: a second counts for one of them.
            busy_s = min(job.seconds, now_s - loads.ended_s)
            loads.ended_s = now_s
            if not arrived or job.reason == "deadline":
                continue
            loads.answered_s = now_s
            if job.seconds > 0:
                if loads.is_probing and 2 * busy_s < expected_s:
                    loads.speed = Speed()
                loads.speed.add(num_bytes * arrived, busy_s)
        job.reads.clear()
        for fetch in job.spec.fetches if late else ():
            num_bytes = self._kept(job.spec, fetch, frozenset(late))
            job.late_bytes[fetch.tier] = job.late_bytes.get(fetch.tier, 0) + num_bytes
            self._loads[fetch.tier].late_bytes += num_bytes

    def _kept(self, spec: CPULoadStoreSpec, fetch: Fetch, chunks: Collection[OffloadKey]) -> int:
        """Return the bytes of the slots of these chunks, which may take turns in them."""
        slots, named = spec.host_slots.tolist(), zip(fetch.positions, fetch.keys, strict=True)
        in_slot = {slots[i]: key for i, key in named if key in chunks}
        return self._host.bytes_of_all(list(in_slot.values()))

    def released(self, job: LoadJob) -> None:
        """Note that nothing writes to the slots of an answered load any more."""
        for name, num_bytes in job.late_bytes.items():
            self._loads[name].late_bytes -= num_bytes

    # ---- early reads ----

    def may_read_early(self, tier: str) -> bool:
        """Whether a tier loads for no running request, and keeps less memory than it may."""
        if (loads := self._loads.get(tier)) is None:
            return True
        return not loads.in_flight and loads.flying_bytes + loads.late_bytes < self.share_bytes

    def early_bytes(self, tier: str) -> int:
        """Return the host memory that a tier's early reads keep, late ones included."""
        return loads.early_bytes if (loads := self._loads.get(tier)) else 0

    def hangs(self, tier: Tier) -> bool:
        """Whether reads of a tier go on that were given up at their deadline."""
        return (loads := self._loads.get(tier.name)) is not None and loads.late_bytes > 0

    def read_s(self, tier: str, num_bytes: int) -> float | None:
        """Return how long reading so many bytes takes by the last loads; None if unknown."""
        return loads.speed.seconds(num_bytes) if (loads := self._loads.get(tier)) else None

    def keeps_early(
        self, tier: str, flying_bytes: int, late_bytes: int = 0, has_arrived: bool = False
    ) -> None:
        """Note that reads for queued requests keep more memory now, or less.

        Args:
            tier: from which they read.
            flying_bytes: by how much more reads in flight keep.
            late_bytes: the same of answered reads, which may still write to it.
            has_arrived: whether a read has brought something.
        """
        loads = self._loads[tier]
        loads.flying_bytes += flying_bytes
        loads.late_bytes += late_bytes
        loads.early_bytes += flying_bytes + late_bytes
        if has_arrived:
            loads.answered_s = self._host.now_s()

    # ---- decisions ----

    def is_worth_loading(
        self, keys: Sequence[OffloadKey], num_tokens: int, req_context: ReqContext
    ) -> bool:
        """Decide whether a load that lookups found is promised to a request.

        False: a tier was declined for the request, and its lookups leave it out from now on. Look
        up again for what host memory and the other tiers have.

        Args:
            keys: what the load would read.
            num_tokens: what the engine need not compute then.
            req_context: of the request.
        """
        if not self._loads:
            return True
        tiers, num_bytes = self._tiers_of(req_context), self._host.bytes_of_all(keys)
        if not any(self._reason(tier, num_bytes, 0) for tier in tiers):
            return True  # as for most loads: even if all of it came from one tier
        by_tier: Counter[Tier] = Counter()
        left = self._host.absent(keys)
        if run := left[: tiers[0].num_leading(left)]:
            by_tier[tiers[0]], left = self._host.bytes_of_all(run), left[len(run) :]
        for key in left:
            if tier := first_holder(key, tiers)[0]:
                by_tier[tier] += self._host.bytes_of(key)
        tokens_per_byte = num_tokens / max(1, num_bytes)
        declined = {
            tier: reason
            for tier, count in by_tier.items()
            if (reason := self._reason(tier, count, count * tokens_per_byte))
        }
        for tier, reason in declined.items():
            self._declined.setdefault(req_context.req_id, {})[tier.name] = reason
            self._loads[tier.name].declines += 1
            self._lookups[tier.name, _RESULTS[reason]] += 1
        if len(self._declined) > MAX_DECLINED:
            del self._declined[next(iter(self._declined))]
        return not declined

    def _reason(self, tier: Tier, num_bytes: int, num_tokens: float) -> str:
        """Return why a load from a tier is declined; "" if it is promised."""
        loads, now_s = self._loads.get(tier.name), self._host.now_s()
        if loads is None:
            return ""
        if loads.late_bytes >= self.share_bytes:
            return NOT_IN_TIME  # no probe either: it would keep its slots as well
        if loads.is_to_probe(now_s):
            return ""
        wait_s = loads.wait_s(now_s)
        if wait_s > self._load_timeout_s:
            return NOT_IN_TIME
        load_s, tokens_per_s = loads.speed.seconds(num_bytes), self._prefill.per_s
        if load_s is None or tokens_per_s is None:
            return ""
        return TOO_SLOW if wait_s + load_s > max(LEAST_S, num_tokens / tokens_per_s) else ""

    def allowed(self, tiers: tuple[Tier, ...], req_id: str) -> tuple[Tier, ...]:
        """Return those of these tiers that are not declined for a request; ask full ones again."""
        if declined := self._declined.get(req_id) if self._declined else None:
            tiers = tuple(tier for tier in tiers if tier.name not in declined)
        if any(map(self._is_full, tiers)):
            return tuple(Tier(t.name, _Full(t.presence)) if self._is_full(t) else t for t in tiers)
        return tiers

    def has_full(self, tiers: Iterable[Tier]) -> bool:
        """Whether one of these tiers loads nothing more until loads in flight have ended."""
        return any(map(self._is_full, tiers))

    def _is_full(self, tier: Tier) -> bool:
        """Whether a tier's loads, in flight and late, keep as much memory as they may.

        Until a tier answers, as after an idle time, it could be one that hangs.
        """
        loads, host = self._loads.get(tier.name), self._host
        if loads is None or not loads.flying_bytes or loads.late_bytes >= self.share_bytes:
            return False  # it is declined, if late loads alone are too many
        if host.busy_slots == host.num_slots:
            return False  # nothing has room, from whichever tier
        kept_bytes = loads.flying_bytes + loads.late_bytes
        if self._host.now_s() <= loads.answered_s + self._load_timeout_s:
            return kept_bytes > self._half
        return kept_bytes >= self.share_bytes

    def declined(self, tiers: tuple[Tier, ...], req_id: str) -> dict[Tier, str]:
        """Return those of these tiers that are declined for a request, with the reasons."""
        declined = self._declined.get(req_id, {})
        return {tier: declined[tier.name] for tier in tiers if tier.name in declined}

    def forget(self, req_id: str) -> None:
        """Forget a request."""
        self._declined.pop(req_id, None)
