"""``inspect --diff``: two namespaces side by side. All commands name one by the same digits."""

import asyncio
import json

import pytest
from disk_commands import SIZE, answered, kvoffload

from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of

ONE, OTHER = "aa" * 32, "ab" * 32
FACTS = {"label.model": "org/m", "kv_dtype": "auto", "dtype": "bf16", "old": "1"}
OTHERS = {"label.model": "/x/m", "kv_dtype": "fp8", "dtype": "bf16", "new": "[b]\x1b"}


@pytest.fixture(params=["disk", "redis"])
def store(request, tmp_path):
    """A store with two namespaces of one model, as the commands take it."""
    if request.param == "disk":
        fill("disk", {"root": str(tmp_path / "kv"), "capacity": "64MiB"})
        return str(tmp_path / "kv")
    url = request.getfixturevalue("own_redis").url
    fill("redis", {"url": url})
    return url


def fill(type, options):
    async def whole():
        for name, facts in ((ONE, FACTS), (OTHER, OTHERS)):
            backend = open_backend(type, options, name)
            await backend.describe(facts)
            assert all(await backend.write(keys_of(2), filled(keys_of(2), SIZE)))
            await backend.close()

    asyncio.run(whole())


def test_the_facts_that_differ_stand_side_by_side(store):
    done = kvoffload("inspect", store, "--diff", ONE, OTHER[:8])
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "kv_dtype\n  aaaaaaaaaaaaaaaa  auto\n  abababababababab  fp8\n"
        "new\n  aaaaaaaaaaaaaaaa  (none)\n  abababababababab  [b]\\x1b\n"
        "old\n  aaaaaaaaaaaaaaaa  1\n  abababababababab  (none)\n"
    )
    done = kvoffload("inspect", store, "--diff", ONE, OTHER, "-v")
    assert "dtype\n  aaaaaaaaaaaaaaaa  bf16\n  abababababababab  bf16\n" in done.stdout
    assert "label.model\n" in done.stdout
    assert "no stored fact differs" in kvoffload("inspect", store, "--diff", ONE, ONE).stdout


def test_the_difference_as_json(store):
    found = answered("inspect", store, "--diff", OTHER, ONE)
    assert found == {
        "namespaces": [OTHER, ONE],
        "facts": {"kv_dtype": ["fp8", "auto"], "new": ["[b]\x1b", None], "old": [None, "1"]},
    }
    found = json.loads(kvoffload("inspect", store, "--diff", OTHER, ONE, "-v", "--json").stdout)
    assert found["facts"]["dtype"] == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (("aaaa", OTHER), "8 digits or more"),
        ((ONE, "0123456789"), "there is no such namespace here; inspect lists them"),
        (("a", OTHER), "2 namespaces begin like that"),
    ],
)
def test_a_name_that_means_no_namespace_is_an_error_that_says_what_to_do(store, wanted, said):
    done = kvoffload("inspect", store, "--diff", *wanted)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_inspect_gc_and_the_log_name_a_namespace_by_the_same_digits(store):
    text = kvoffload("inspect", store).stdout
    for name in (ONE, OTHER):
        (row,) = [line for line in text.splitlines() if name[:16] in line]
        assert row.split("│")[2].strip() == "m"
        assert answered("gc", store, "--namespace", name[:16]).get("removed") == 2
