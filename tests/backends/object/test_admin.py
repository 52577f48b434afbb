"""What operators do with a bucket: look, remove, verify, examine; on a real S3 server."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from disk_commands import answered

from kvoffload import open_backend
from kvoffload.backends.admin import Check, Garbage
from kvoffload.backends.object import admin
from kvoffload.backends.object.naming import MANIFESTS, chunk_name, namespace_tag
from kvoffload.errors import ConfigError
from kvoffload.offload.base import tenant_id
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.s3_stand_in import MISSING, Answer, S3StandIn, error

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "object.md"
NAMESPACES = ("a" * 40, "b" * 40)


@pytest.fixture
async def stores(options):
    """Two namespaces in one bucket, with three chunks each; beside an object that is none."""
    opened = [open_backend("object", options, name) for name in NAMESPACES]
    for backend in opened:
        await backend.describe({"model": "m"})
        assert all(await backend.write(keys_of(3), filled(keys_of(3))))
    opened[0]._bucket.put("ab/foreign/object", [b"x"], replace=True)
    yield opened
    for backend in opened:
        await backend.close()


async def chunks_of(backend):
    return {each.namespace: each.chunks for each in (await backend.survey()).held}


async def test_a_survey_counts_chunks_and_bytes_of_each_namespace(stores):
    survey = await stores[0].survey()
    assert [each.namespace for each in survey.held] == sorted(
        NAMESPACES, key=namespace_tag
    )  # fmt: skip
    for each in survey.held:
        assert (each.chunks, each.stored_bytes) == (3, 3 * (65536 + 256))
        assert each.facts == {"model": "m"}
        assert 604000 < each.expires_s <= 604800


async def test_gc_removes_one_namespace_or_old_chunks(stores, options):
    one, two = stores
    dry = await one.collect(Garbage(namespace="b" * 8, dry_run=True))
    assert dry.figures == {"dry_run": True, "removed": 3, "freed_bytes": 3 * 65792}
    assert await chunks_of(one) == dict.fromkeys(NAMESPACES, 3)
    assert (await one.collect(Garbage(unused_s=3600))).figures["removed"] == 0
    await one.collect(Garbage(namespace="b" * 8))
    assert await chunks_of(one) == {NAMESPACES[0]: 3}
    assert await two.read(keys_of(1), slots(1)) == [False]
    assert await one.read(keys_of(1), slots(1)) == [True]
    with pytest.raises(ConfigError, match="no such namespace"):
        await one.collect(Garbage(namespace="c" * 8))
    assert (await one.collect(Garbage(unused_s=0))).figures["removed"] == 3
    assert one._bucket.head("ab/foreign/object").nbytes == 1


async def test_gc_of_a_namespaces_old_chunks_leaves_the_others_their_manifests(stores):
    """Engines of the others would know nothing of what is stored, and compute it again."""
    bucket, minute = stores[0]._bucket, "0000000001-" + "0" * 16
    told = [f"{MANIFESTS}/{namespace_tag(each)}/{minute}" for each in NAMESPACES]
    for name in told:
        bucket.put(name, [b"00"], replace=True)
    await stores[0].collect(Garbage(namespace="b" * 8, unused_s=0))
    assert await chunks_of(stores[0]) == {NAMESPACES[0]: 3, NAMESPACES[1]: 0}
    assert [each.name for each in bucket.list(MANIFESTS)] == told[:1]
    await stores[0].collect(Garbage(unused_s=0))
    assert not [*bucket.list(MANIFESTS)]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_gc_erases_the_chunks_of_one_tenant(stores, options, key_file, encrypted):
    given = {**options, "encryption": {"key_file": key_file()}} if encrypted else options
    backend, keys = open_backend("object", given, "c" * 40), keys_of(5, "of tenants")
    await backend.describe({})
    tenants = [tenant_id("one")] * 2 + [tenant_id("two")] * 2 + [b""]
    assert all(await backend.write(keys, filled(keys), tenants))
    one, dry = tenants[0], Garbage(dry_run=True)
    found = (await stores[0].erase(one, dry)).figures  # without the key
    assert (found["removed"], found["unknown"]) == ((0, 11) if encrypted else (2, 7))
    assert (await backend.erase(one, Garbage(unused_s=3600))).figures["removed"] == 0
    assert (await backend.erase(one, dry)).figures["removed"] == 2
    assert await backend.contains(keys) == [True] * 5
    found = (await backend.erase(one, Garbage("c" * 8))).figures
    assert (found["removed"], found["unknown"]) == (2, 1)
    assert await backend.contains(keys) == [False] * 2 + [True] * 3
    await backend.close()


@pytest.mark.parametrize("content", [b"", b"short"], ids=["empty", "short"])
async def test_an_object_without_a_header_keeps_no_tenants_chunks_from_being_erased(
    stores, content
):
    """A server answers a question for a part of an empty object by an error."""
    backend, keys, one = stores[0], keys_of(2, "of a tenant"), tenant_id("one")
    assert all(await backend.write(keys, filled(keys), [one] * 2))
    name = chunk_name(namespace_tag(NAMESPACES[0]), keys_of(1)[0])
    backend._bucket.put(name, [content], replace=True)
    found = (await backend.erase(one, Garbage())).figures
    assert (found["removed"], found["unknown"]) == (2, 6)
    assert await backend.contains(keys) == [False] * 2


async def test_what_is_described_of_a_bucket_does_not_depend_on_foreign_objects(
    stores, monkeypatch
):
    """They may be all that an engine looks at."""
    bucket = stores[0]._bucket
    for number in range(3):
        bucket.put(f"00-foreign/{number}", [b"x"], replace=True)
    monkeypatch.setattr(admin, "MOST_NAMES", 2)
    assert await stores[0].described() == []


async def test_purge_removes_a_namespace_with_its_facts(stores):
    assert await stores[0].purge([NAMESPACES[0]]) == 3
    assert await chunks_of(stores[1]) == {NAMESPACES[1]: 3}


async def test_verify_finds_and_removes_damage(stores):
    backend, tag, (key, other, _) = stores[0], namespace_tag(NAMESPACES[0]), keys_of(3)
    assert (await backend.verify(Check())).is_sound
    chunk = bytearray(backend._bucket.fetch(chunk_name(tag, key), 1 << 20))
    backend._bucket.put(chunk_name(tag, other), [bytes(chunk)], replace=True)
    chunk[-1] ^= 1
    backend._bucket.put(chunk_name(tag, key), [bytes(chunk)], replace=True)
    found = await backend.verify(Check(repair=True))
    assert not found.is_sound
    assert found.figures["reasons"] == {"corrupt_payload": 1, "corrupt_key": 1}
    assert (await backend.verify(Check())).is_sound
    assert (await chunks_of(backend))[NAMESPACES[0]] == 1


async def test_doctor_finds_a_fit_bucket(stores):
    findings = await stores[0].diagnose()
    found = {each.check: each.verdict for each in findings}
    assert found.pop("throughput") != "failed"  # how fast a busy machine is says little
    found.pop("latency"), found.pop("proxy", None)
    checks = {"reachable", "rights", "create-only", "clock", "lifecycle", "encryption"}
    assert found == dict.fromkeys(checks, "ok"), findings
    assert (await chunks_of(stores[0])) == dict.fromkeys(NAMESPACES, 3), "it left its chunks"


@pytest.mark.parametrize(
    ("answer", "check", "remedy"),
    [
        (lambda verb, path: error(403, "AccessDenied"), "reachable", "s3:ListBucket"),
        (lambda verb, path: error(404, "NoSuchBucket"), "reachable", "create it"),
        (
            lambda verb, path: MISSING if verb == "GET" else error(403, "AccessDenied"),
            "right to write",
            "s3:PutObject",
        ),
        (lambda verb, path: Answer(301), "reachable", "set region"),
    ],
)
async def test_doctor_says_what_is_wrong(answer, check, remedy):
    with S3StandIn(answer) as server:
        backend = open_backend("object", server.options(), "n")
        failed = [each for each in await backend.diagnose() if each.verdict == "failed"]
        await backend.close()
    assert [each.check for each in failed] == [check]
    assert remedy in failed[0].remedy


def test_the_commands_take_the_url_of_a_bucket(options):
    words = [word for name, value in options.items() if name != "url"
             for word in ("-o", f"{name}={value}")]  # fmt: skip
    for command in (["inspect"], ["verify"], ["gc", "--older-than", "9d", "--yes"]):
        assert answered(*command, options["url"], *words)


def test_the_guide_names_the_rights_and_settings_that_there_are():
    text = GUIDE.read_text()
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        assert json.loads(block)
    (extras,) = re.findall(r"kvoffload\[(.*?)\]", text)
    project = tomllib.loads((GUIDE.parents[2] / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
