"""``inspect``, ``verify`` and ``gc`` on folders of engines that ended, and of one at work."""

import asyncio
import os
import socket

import pytest
from disk_commands import (
    ON_DISK,
    SIZE,
    answered,
    files_of,
    kvoffload,
    open_disk,
    process,
)

from kvoffload.testing.backends import filled, keys_of, slots


def used_long_ago(path, days):
    facts = path.stat()
    os.utime(path, (facts.st_atime - days * 86400, facts.st_mtime - days * 86400))


@pytest.mark.parametrize("command", ["inspect", "verify", "gc", "top"])
def test_a_socket_of_a_server_is_called_one(tmp_path, command):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/s")
        result = kvoffload(command, f"{tmp_path}/s")
    assert (result.returncode, "is a server's socket" in result.stderr) == (2, True)


def test_inspect_shows_namespaces_bytes_ages_and_use(root):
    used_long_ago(files_of(root)[0], 2)
    report = answered("inspect", str(root))
    assert report["processes"] == 0
    assert report["owner"] is False
    assert report["allocated_bytes"] == report["ledger_bytes"] == 9 * ON_DISK
    by_name = {each["namespace"]: each for each in report["namespaces"]}
    assert {name: each["chunks"] for name, each in by_name.items()} == {"llama": 6, "qwen": 3}
    assert by_name["qwen"]["facts"] == {"model": "qwen", "dtype": "bfloat16"}
    assert sum(each["used_within"]["1 hour"] for each in by_name.values()) == 8
    assert max(each["oldest_s"] for each in by_name.values()) > 86400
    text = kvoffload("inspect", str(root), "-v").stdout
    assert "model=llama" in text.replace("\n", "")


def test_verify_reads_everything_and_repairs_on_request(root):
    assert answered("verify", str(root))["damaged"] == []
    damaged, truncated, strange, *_, last = files_of(root)[3:]  # of one namespace
    with damaged.open("r+b") as file:
        file.seek(9000)
        file.write(b"damage")
    os.truncate(truncated, 5000)
    os.replace(last, strange)
    report = answered("verify", str(root), code=1)
    assert report["reasons"] == {"corrupt_payload": 1, "corrupt_size": 1, "corrupt_key": 1}
    assert not any(each["removed"] for each in report["damaged"])
    report = answered("verify", str(root), "--repair", code=1)
    assert all(each["removed"] for each in report["damaged"])
    report = answered("verify", str(root))
    assert (report["damaged"], report["chunks"]) == ([], 5)
    assert kvoffload("verify", str(root)).stdout.startswith("5 chunks")


def test_gc_by_age(root):
    old = files_of(root)[3:7]
    for path in old:
        used_long_ago(path, 3)
    assert answered("gc", str(root), "--older-than", "4d")["removed"] == 0
    assert answered("gc", str(root), "--older-than", "36h", "--dry-run")["removed"] == 4
    assert len(files_of(root)) == 9
    report = answered("gc", str(root), "--older-than", "36h")
    assert (report["removed"], report["kept"], report["freed_bytes"]) == (4, 5, 4 * ON_DISK)
    assert not any(path.exists() for path in old)
    assert answered("inspect", str(root))["ledger_bytes"] == 5 * ON_DISK


def test_gc_of_a_namespace_by_its_name_or_the_beginning_of_its_folders(root):
    assert answered("gc", str(root), "--namespace", "qwen")["removed"] == 3
    (left,) = answered("inspect", str(root))["namespaces"]
    assert left["namespace"] == "llama"
    assert answered("gc", str(root), "--namespace", left["folder"][:10])["removed"] == 6
    assert answered("inspect", str(root))["namespaces"] == []


def test_gc_refuses_a_beginning_that_is_short_or_not_the_only_one(root):
    (folder,) = {path.parent.parent for path in files_of(root)[:1]}
    for name in ("0123456789" + "a" * 22, "0123456789" + "b" * 22):
        (root / (name + folder.name[len(name) :])).mkdir()
    for wanted, problem in (
        (folder.name[:7], "8 digits"),
        ("0123456789", "2 namespaces begin like that"),
        ("e" * 20, "no such namespace"),
    ):
        result = kvoffload("gc", str(root), "--namespace", wanted)
        assert (result.returncode, problem in result.stderr) == (2, True), result.stderr
    assert len(files_of(root)) == 9


@pytest.mark.parametrize(
    ("manifest", "shown"),
    [
        ('{"facts": {"model": "a[/]b [red]c", "n": 1}}', "model=a[/]b [red]c, n=1"),
        ('{"facts": {"model": "\\u001b[31m\\ud800"}}', "model=\\x1b[31m\\xd800"),
        ('{"facts": ["model"]}', "no facts stored"),
        ("[" * 100_000, "no facts stored"),
    ],
)
def test_inspect_shows_facts_as_they_are_and_no_markup(root, manifest, shown):
    for path in root.glob("*/manifest.json"):
        path.write_text(manifest)
    result = kvoffload("inspect", str(root), "-v")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert result.stdout.count(shown) == 2


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "/nowhere"),
        ("verify", "/nowhere"),
        ("gc", "/nowhere"),
        ("gc", "{root}", "--older-than", "soon"),
        ("gc", "{root}", "-o", "x=1"),
        ("inspect", "{root}", "-o", "x=1"),
        ("verify", "redis://localhost:port"),
        ("verify", "{root}", "--sample", "5"),
        ("verify", "{root}", "--sample", "0%"),
        ("verify", "{root}", "--rate", "100"),
        ("gc", "{root}", "--namespace", "unknown"),
    ],
)
def test_wrong_words_are_named_and_end_with_two(root, words):
    result = kvoffload(*(word.format(root=root) for word in words))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("kvoffload: ")
    assert len(files_of(root)) == 9


async def test_beside_an_engine_at_work(root):
    backend = open_disk(root, "llama")
    keys = keys_of(40, "live")
    results = []

    async def work():
        while len(results) < 4:
            await backend.write(keys, filled(keys, SIZE))
            into = slots(40, SIZE)
            await backend.read(keys, into)

    async def tools():
        for words in (
            ("inspect", str(root)),
            ("verify", str(root)),
            ("gc", str(root), "--older-than", "0s"),
            ("verify", str(root), "--repair"),
        ):
            results.append(await asyncio.to_thread(answered, *words, run=process))

    await asyncio.gather(work(), tools())
    assert (results[0]["processes"], results[0]["owner"]) == (1, True)
    assert results[1]["damaged"] == results[3]["damaged"] == []
    assert results[2]["removed"] > 0
    assert not any(reason.startswith("corrupt") for reason in backend.counters())
    await backend.write(keys, filled(keys, SIZE))
    assert backend.usage().resident_bytes == sum(p.stat().st_blocks * 512 for p in files_of(root))
    await backend.close()
