"""What the scheduler knows of the tiers follows what the workers' stores hold: no engine."""

import asyncio
import pickle
from functools import partial

import pytest

from kvoffload.backends.base import Removal
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.config import parse_config
from kvoffload.connectors.vllm import worker_presence
from kvoffload.connectors.vllm.rank_tiers import QUIET_S, RankTiers
from kvoffload.connectors.vllm.worker_presence import PresenceQuery, WorkerPresence
from kvoffload.io.chunk_jobs import same_length
from kvoffload.io.open_stores import OpenStore
from kvoffload.io.protocol import PresenceChanges, Present, Removed
from kvoffload.io.remote_tier import ANSWER_S, RemoteTier
from kvoffload.testing.backends import filled, keys_of

KEYS = keys_of(6)
CONFIG = parse_config(
    {"cpu_bytes": 1 << 20, "backends": [{"type": "memory"}, {"type": "redis", "url": "redis://h"}]}
)


class Unlisted:
    """A store that lists nothing; holds keys, or fails in a way."""

    def __init__(self, *keys):
        self.held, self.fails, self.asked = set(keys), None, []

    async def contains(self, keys):
        self.asked.append(list(keys))
        if self.fails == "raise":
            raise ConnectionError("no route")
        if self.fails == "hang":
            await asyncio.Event().wait()
        if self.fails == "short":
            return [True]
        return [key in self.held for key in keys]


class Fed(RemoteTier):
    """A tier without a server between: the test says when the store's messages come in."""

    def __init__(self, backend):
        super().__init__("tier", 1.0, lambda: None)
        self.store = OpenStore("tier", backend)
        self.opened(self.store.index is not None)

    def feed(self):
        while message := self.store.changes():
            self.announced(message)

    async def answer(self):
        if keys := self.take_questions():
            try:
                found = await asyncio.wait_for(self.store.backend.contains(keys), 0.02)
                self.answered(Present("tier", keys, same_length(found, keys)))
            except Exception:
                self.answered(Present("tier", keys, [False] * len(keys)))


class Ranks:
    """The stores and worker halves of two ranks, and the scheduler's view of them."""

    def __init__(self):
        self.now = 0.0
        self.tiers = RankTiers(CONFIG, [0, 1], {"memory"}, clock=lambda: self.now)
        self.open("")

    def open(self, generation):
        self.stores = [MemoryBackend(MemoryOptions(), f"{generation}{i}") for i in range(2)]
        self.others = [Unlisted(), Unlisted()]
        self.fed = [{"memory": Fed(self.stores[i]), "redis": Fed(self.others[i])} for i in range(2)]
        self.workers = [WorkerPresence(i, self.fed[i]) for i in range(2)]
        for worker in self.workers:
            worker.renew(generation)

    def give(self, rank, store):
        """Give a rank another store, as after a restart."""
        self.stores[rank], self.fed[rank] = store, {"memory": Fed(store)}
        self.workers[rank] = WorkerPresence(rank, self.fed[rank])

    async def ask(self, questions):
        """Send questions to both workers, and wait until their stores have answered."""
        for worker, fed in zip(self.workers, self.fed, strict=True):
            worker.ask(questions)
            assert worker.take_answers() == []
            await fed["redis"].answer()

    def reports(self):
        """Collect a report of each rank, as it is after its way through a pickle."""
        for fed in self.fed:
            fed["memory"].feed()
        reports = [(worker.take_parts(), worker.take_answers()) for worker in self.workers]
        return pickle.loads(pickle.dumps(reports))

    def step(self):
        for report in self.reports():
            self.tiers.apply(*report)

    async def answered(self):
        """Send the open questions to both workers, and bring their answers back."""
        questions = self.tiers.take_questions()
        await self.ask(questions)
        for report in self.reports():
            self.tiers.apply(*report)
        return questions

    def hold(self, tier, keys=KEYS):
        return [self.tiers.presences[tier].holds(key) for key in keys]


@pytest.fixture
async def ranks():
    return Ranks()


async def store(ranks, keys, on=(0, 1)):
    for rank in on:
        await ranks.stores[rank].write(keys, filled(keys))


async def test_chunks_that_all_ranks_have_hit_as_soon_as_their_reports_are_in(ranks):
    await store(ranks, KEYS[:3])
    await store(ranks, KEYS[3:4], on=[1])
    first, second = ranks.reports()
    ranks.tiers.apply(*first)
    assert ranks.hold("memory") == [None] * 3 + [False] * 3
    assert ranks.tiers.is_waiting
    ranks.tiers.apply(*second)
    assert ranks.hold("memory") == [True] * 3 + [False] * 3
    assert not ranks.tiers.is_waiting
    await ranks.stores[0].remove(KEYS[:1])
    ranks.step()
    assert ranks.hold("memory") == [False, True, True, False, False, False]


async def test_a_listing_comes_in_portions(ranks, monkeypatch):
    monkeypatch.setattr(worker_presence, "MAX_CHANGES", 4)
    for rank in range(2):
        earlier = MemoryBackend(MemoryOptions(), "earlier")
        await earlier.write(KEYS, filled(KEYS))
        ranks.give(rank, earlier)
    ranks.step()
    assert ranks.tiers.is_waiting
    assert ranks.hold("memory").count(True) == 4
    ranks.step()
    assert not ranks.tiers.is_waiting
    assert ranks.hold("memory") == [True] * 6
    assert ranks.reports() == [([], [])] * 2


async def test_a_worker_keeps_no_copy_of_what_it_has_reported(ranks):
    """A million chunks would take a hundred megabytes of each rank, which no lookup asks."""
    earlier = MemoryBackend(MemoryOptions(), "earlier")
    await earlier.write(KEYS[:3], filled(KEYS[:3]))
    tier = Fed(earlier)
    tier.feed()
    worker = WorkerPresence(0, {"memory": tier})
    assert not tier._keys
    await earlier.remove(KEYS[:1])
    await earlier.write(KEYS[3:], filled(KEYS[3:]))
    tier.feed()
    (part,) = worker.take_parts()
    assert set(part.added) == set(KEYS[1:])
    assert part.removed == KEYS[:1]
    assert not tier._keys
    assert not tier._relayed
    assert worker.take_parts() == []


async def test_a_tier_has_news_until_all_that_came_is_reported(monkeypatch):
    """A worker looks at a tier in a step that it has news, and in no other."""
    monkeypatch.setattr(worker_presence, "MAX_CHANGES", 2)
    tier = RemoteTier("memory", 1.0, lambda: None)
    tier.opened(True)
    worker = WorkerPresence(0, {"memory": tier})
    tier.take(PresenceChanges("memory", KEYS[:3], [], True))
    for num_added, has_more in ((2, True), (1, False)):
        assert tier.has_news
        tier.has_news = False
        (part,) = worker.take_parts()
        assert (len(part.added), tier.has_news) == (num_added, has_more)
    removal = partial(tier.take, Removed("memory", [(KEYS[0], "evicted")]))
    for comes in (removal, tier.reset, partial(tier.opened, True), tier.refused):
        tier.has_news = False
        comes()
        assert tier.has_news


async def test_a_question_whose_answer_does_not_come_in_time_is_no(ranks, monkeypatch):
    worker, tier = ranks.workers[0], ranks.fed[0]["redis"]
    worker.ask({"redis": PresenceQuery(1, KEYS[:2]), "memory": PresenceQuery(2, KEYS[:1])})
    assert tier.take_questions() == KEYS[:2]
    tier.answered(Present("tier", KEYS[:1], [True]))
    assert worker.take_answers() == []
    late_s = worker_presence.time.monotonic() + tier.lookup_timeout_s
    monkeypatch.setattr(worker_presence.time, "monotonic", lambda: late_s)
    answers = {answer.number: answer.present for answer in worker.take_answers()}
    assert answers == {1: [True, False], 2: [False]}
    tier.answered(Present("tier", KEYS[:2], [True, True]))
    assert worker.take_answers() == []
    assert not tier._asked_for


async def test_reports_from_before_a_reset_do_not_count(ranks):
    await store(ranks, KEYS[:2])
    ranks.tiers.presences["redis"].holds(KEYS[0])
    questions = ranks.tiers.take_questions()
    await ranks.ask(questions)
    late = ranks.reports()
    assert any(answers for _, answers in late)
    ranks.tiers.renew("next")
    assert ranks.tiers.is_waiting
    for report in late:
        ranks.tiers.apply(*report)
    assert ranks.hold("memory", KEYS[:2]) == [None, None]
    ranks.open("next")
    await store(ranks, KEYS[1:2])
    ranks.step()
    assert ranks.hold("memory", KEYS[:2]) == [False, True]
    assert not ranks.tiers.is_waiting


async def test_a_tier_whose_server_died_is_listed_again_from_nothing(ranks):
    await store(ranks, KEYS[:2])
    ranks.step()
    assert ranks.hold("memory", KEYS[:2]) == [True, True]
    tier = ranks.fed[1]["memory"]
    tier.reset()
    ranks.tiers.apply(*ranks.reports()[1])
    assert ranks.hold("memory", KEYS[:2]) == [None, None]
    again = MemoryBackend(MemoryOptions(), "again")
    await again.write(KEYS[1:2], filled(KEYS[1:2]))
    tier.store = OpenStore("tier", again)
    tier.opened(True)
    ranks.step()
    assert ranks.hold("memory", KEYS[:2]) == [False, True]


async def test_a_listing_that_brings_nothing_keeps_the_engine_stepping_for_a_bounded_time(ranks):
    ranks.tiers.apply(*ranks.reports()[0])
    assert ranks.tiers.is_waiting
    ranks.now = QUIET_S
    assert not ranks.tiers.is_waiting


async def test_a_plug_in_whose_index_fails_delays_nobody(ranks, caplog):
    class Broken(MemoryBackend):
        def take_changes(self, limit):
            raise RuntimeError("a plug-in's bug")

    for rank in range(2):
        ranks.give(rank, (Broken if rank else MemoryBackend)(MemoryOptions(), "n"))
    await store(ranks, KEYS[:1])
    ranks.step()
    assert ranks.hold("memory", KEYS[:1]) == [False]
    assert not ranks.tiers.is_waiting
    assert ranks.reports() == [([], [])] * 2
    assert "take_changes failed" in caplog.text


async def test_a_store_that_lists_nothing_is_asked_by_every_rank(ranks):
    ranks.step()  # the listings
    ranks.others[0].held, ranks.others[1].held = set(KEYS[:3]), set(KEYS[1:4])
    assert ranks.hold("redis") == [None] * 6
    assert ranks.tiers.is_waiting
    ranks.tiers.presences["redis"].forget(KEYS[2:3])
    questions = ranks.tiers.take_questions()
    assert ranks.tiers.is_waiting
    await ranks.ask(questions)
    first, second = ranks.reports()
    ranks.tiers.apply(*first)
    assert ranks.hold("redis") == [None, None, False, None, None, None]
    ranks.tiers.apply(*second)
    assert ranks.hold("redis") == [False, True, False, False, False, False]
    assert ranks.others[0].asked == ranks.others[1].asked == [KEYS]
    assert not ranks.tiers.is_waiting


@pytest.mark.parametrize("fails", ["raise", "hang", "short"])
async def test_a_store_that_cannot_be_asked_has_nothing(ranks, fails):
    ranks.step()
    ranks.others[0].held, ranks.others[1].fails = set(KEYS), fails
    assert ranks.hold("redis") == [None] * 6
    assert len((await ranks.answered())["redis"].keys) == 6
    assert ranks.hold("redis") == [False] * 6
    assert not ranks.tiers.is_waiting


async def test_an_answer_that_never_comes_is_no(ranks):
    ranks.step()
    assert ranks.hold("redis", KEYS[:1]) == [None]
    ranks.tiers.take_questions()
    assert ranks.tiers.is_waiting
    ranks.now = CONFIG.lookup_timeout_s + CONFIG.load_timeout_s
    assert ranks.hold("redis", KEYS[:1]) == [False]
    assert not ranks.tiers.is_waiting
    ranks.now += ANSWER_S  # asked again, and answered twice by the same rank
    assert ranks.hold("redis", KEYS[:1]) == [None]
    question = ranks.tiers.take_questions()["redis"]
    asked = ranks.tiers.presences["redis"]
    for number in (1, 1, question.number):
        asked.answer(number, [True])
    assert ranks.hold("redis", KEYS[:1]) == [None]
    asked.answer(question.number, [True])
    assert ranks.hold("redis", KEYS[:1]) == [True]


@pytest.mark.parametrize("tier", ["memory", "redis"])
async def test_only_removals_of_what_was_announced_are_told_of(ranks, tier):
    ranks.step()
    presence = ranks.tiers.presences[tier]
    presence.written(KEYS[:3])
    assert ranks.hold(tier, KEYS[:3]) == [True] * 3
    presence.forget(KEYS[2:3])
    presence.removed([Removal(key, "evicted") for key in (KEYS[0], KEYS[0], KEYS[2], KEYS[4])])
    assert ranks.tiers.tiers[tier == "redis"].take_removals() == [Removal(KEYS[0], "evicted")]
    assert presence.take_removals() == []
    assert ranks.hold("redis", KEYS[1:3]) == ([True, False] if tier == "redis" else [None, None])


def test_announced_chunks_of_a_store_that_lists_nothing_are_bounded(monkeypatch):
    from kvoffload.connectors.vllm import rank_tiers

    monkeypatch.setattr(rank_tiers, "MAX_ANNOUNCED", 2)
    tier = rank_tiers.AskedTier(1, 1.0)
    tier.written(KEYS[:3])
    tier.removed([Removal(key, "evicted") for key in KEYS[:3]])
    assert [removal.key for removal in tier.take_removals()] == KEYS[1:3]


async def test_a_server_that_came_after_the_workers_is_asked_and_its_list_is_not_kept():
    """A worker that began without the host's server has told the scheduler of no list."""
    tier = RemoteTier("serve", 1.0, lambda: None)
    worker = WorkerPresence(0, {"serve": tier})
    assert not worker.listed
    tier.opened(True)
    tier.announced(PresenceChanges("serve", KEYS, [], True))
    assert not tier.has_changes
    worker.ask({"serve": PresenceQuery(1, KEYS[:2])})
    tier.answered(Present("serve", tier.take_questions(), [True, False]))
    (answer,) = worker.take_answers()
    assert list(answer.present) == [True, False]
    assert worker.take_parts() == []


async def test_a_tier_that_is_down_on_one_rank_is_down_until_that_rank_has_it_again(ranks):
    def is_up():
        for rank, worker in enumerate(ranks.workers):
            if (down := worker.take_down()) is not None:
                ranks.tiers.note_down(pickle.loads(pickle.dumps({rank: down})))
        return [ranks.tiers.presences[tier].is_up for tier in ("memory", "redis")]

    assert is_up() == [True, True]
    ranks.fed[1]["redis"].reset()
    ranks.fed[0]["memory"].reset()
    assert is_up() == [False, False]
    assert [worker.take_down() for worker in ranks.workers] == [None, None], "each is told once"
    ranks.tiers.renew("later")
    assert is_up() == [False, False]
    ranks.fed[0]["memory"].opened(True)
    assert is_up() == [True, False]
    ranks.fed[1]["redis"].opened(False)
    assert is_up() == [True, True]
