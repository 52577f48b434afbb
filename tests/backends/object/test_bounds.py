"""What bounds requests: the breaker by share, the listings."""

import itertools

import pytest

from kvoffload import open_backend
from kvoffload.backends.object import admin
from kvoffload.backends.object.failures import Failed, Failure
from kvoffload.backends.object.request_kind import Requests
from kvoffload.backends.object.share_breaker import ShareBreaker
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.s3_stand_in import Answer, S3StandIn


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ("---", False),  # too few to tell
        ("----", True),
        ("+" * 20 + "-" * 9, False),
        ("+" * 20 + "-" * 10, True),
        ("-+" * 20, True),
        ("--++++++" * 10, False),
        ("---" + "+" * 20 + "---" + "+" * 20, False),
    ],
)
def test_half_of_the_latest_requests_open_the_breaker(outcomes, is_open):
    breaker = ShareBreaker()
    for outcome in outcomes:
        if breaker.is_open:
            break
        breaker.succeeded() if outcome == "+" else breaker.failed()
    assert breaker.is_open is is_open


def test_an_open_breaker_admits_one_request_a_pause_and_pauses_grow():
    clock = Clock()
    breaker = ShareBreaker(clock=clock, jitter=lambda: 0.0)
    assert breaker.failed(at_once=True)
    assert not breaker.failed(at_once=True), "it opened twice"
    for pause_s in (1, 2, 4, 8, 16, 16):
        clock.now += pause_s - 0.1
        assert not breaker.admits()
        clock.now += 0.2
        assert breaker.admits()
        assert not breaker.admits()
        clock.now -= 0.1
    assert breaker.succeeded()
    assert breaker.admits()
    assert not breaker.succeeded()
    assert breaker.failed(at_once=True)
    clock.now += 1.0
    assert breaker.admits(), "the first pause is short again"


def test_after_a_test_without_a_chunk_the_next_failure_opens_the_breaker_for_longer():
    clock = Clock()
    breaker = ShareBreaker(clock=clock, jitter=lambda: 0.0)
    breaker.failed(at_once=True)
    for pause_s in (1.0, 4.0, 16.0):
        clock.now += pause_s
        assert breaker.is_due
        assert breaker.admits()
        assert breaker.succeeded(is_test=True)
        assert not breaker.is_open
        assert breaker.failed()
        assert not breaker.is_due
    clock.now += 100
    assert breaker.admits()
    assert breaker.succeeded(is_test=True)
    assert not breaker.succeeded(), "it was closed"
    assert not breaker.failed()
    assert not breaker.is_open


def test_a_bucket_that_comes_and_goes_is_said_once(caplog):
    requests = Requests("read", lambda reason: None, lambda: None)
    requests.breaker.pause_s = 0.0

    def refused():
        raise Failed(Failure("refused_forbidden", "grant it", "403 AccessDenied", is_lasting=True))

    for _ in range(5):
        with pytest.raises(Failed):
            requests.ask(refused)
        assert requests.ask(lambda: 1) == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "forbidden (403 AccessDenied); grant it" in said[0]
    assert "answers again" in said[1]


def test_another_reason_behind_an_answer_without_content_is_said_at_once(caplog):
    """The answer to a HEAD is the same 403, whether the keys are wrong or the clock."""
    reasons = iter(("refused_credentials", "refused_credentials", "refused_clock_skew"))

    def tell():
        raise Failed(Failure(next(reasons), "mend it", "403 Code", is_lasting=True))

    def refused():
        raise Failed(Failure("refused_forbidden", "grant it", "403", is_lasting=True))

    counted = []
    requests = Requests("lookup", counted.append, tell)
    requests.breaker.pause_s = 0.0
    for _ in range(3):
        with pytest.raises(Failed):
            requests.ask(refused)
        assert requests.ask(lambda: 1) == 1
    said = [record.getMessage().removeprefix("object: ") for record in caplog.records]
    pause, again = "lookups pause, until the bucket answers again", "the bucket answers again"
    assert said == [
        f"{pause}: credentials (403 Code); mend it",
        f"{again} (lookups)",
        f"{pause}: clock skew (403 Code); mend it",
        f"{again} (lookups)",
    ]
    assert counted == ["refused_credentials", "refused_credentials", "refused_clock_skew"]


async def test_engines_send_no_list(s3):
    """A listing of a large bucket takes minutes and money."""
    backend, keys = open_backend("object", s3.options(), "n"), keys_of(3)
    listed = []
    backend._bucket.list = backend._heads.list = lambda *words: listed.append(words)
    await backend.contains([])
    await backend.describe({"model": "m"})
    assert await backend.write(keys, filled(keys)) == [True] * 3
    assert await backend.contains(keys) == [True] * 3
    assert await backend.read(keys, slots(3)) == [True] * 3
    await backend.remove(keys)
    await backend.close()
    assert listed == []


async def test_a_listing_without_end_ends(monkeypatch):
    monkeypatch.setattr(admin, "MOST_NAMES", 500)
    monkeypatch.setattr(admin, "_MOST_LISTED", 2000)
    pages = itertools.count()

    def answer(verb, path):
        if "list-type" not in path:
            return Answer(404)
        page = next(pages)
        names = [f"kv/{i % 256:02x}/{'0' * 16}/{page:08x}{i:04x}" for i in range(1000)]
        contents = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-11-22T01:58:41.000Z</LastModified>"
            f"<ETag>e</ETag><Size>1</Size></Contents>"
            for name in names
        )
        body = (
            "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>"
            f"{page}</NextContinuationToken>{contents}</ListBucketResult>"
        )
        return Answer(200, body.encode())

    with S3StandIn(answer) as server:
        backend = open_backend("object", server.options(), "n")
        assert len(await backend.described()) <= 1
        looked_at = next(pages)
        assert looked_at <= 3
        with pytest.raises(OSError, match="without end"):
            await backend.survey()
        await backend.close()
