"""What ``inspect``, ``verify`` and ``gc`` say: exactly, in whole lines, and to the right user."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from disk_commands import (
    ON_DISK,
    SIZE,
    answered,
    as_user,
    files_of,
    kvoffload,
    open_disk,
    process,
)

from kvoffload.cli.output import print_numbers
from kvoffload.testing.backends import filled, keys_of


async def test_a_namespace_opened_by_its_name_is_found_by_that_name(tmp_path):
    for name in ("alpha", "beta"):
        backend = open_disk(tmp_path, name)
        await backend.write(keys_of(2), filled(keys_of(2), SIZE))
        await backend.close()
    named = {each["namespace"]: each for each in answered("inspect", str(tmp_path))["namespaces"]}
    assert sorted(named) == ["alpha", "beta"]
    assert "namespace=alpha" in kvoffload("inspect", str(tmp_path), "-v").stdout
    assert [row[0] for row in table(kvoffload("inspect", str(tmp_path)).stdout)] == [
        "alpha",
        "beta",
    ]
    assert answered("gc", str(tmp_path), "--namespace", "alpha")["removed"] == 2
    (left,) = answered("inspect", str(tmp_path))["namespaces"]
    assert left["namespace"] == "beta"


async def test_facts_replace_a_name_alone_and_a_name_replaces_no_facts(tmp_path):
    backend = open_disk(tmp_path, "alpha")
    await backend.write(keys_of(1), filled(keys_of(1), SIZE))
    await backend.describe({"model": "m"})
    await backend.close()
    backend = open_disk(tmp_path, "alpha")
    await backend.write(keys_of(2), filled(keys_of(2), SIZE))
    await backend.close()
    (found,) = answered("inspect", str(tmp_path))["namespaces"]
    assert (found["namespace"], found["facts"]) == ("alpha", {"model": "m"})


async def test_an_empty_namespace_has_no_ages(tmp_path):
    await open_disk(tmp_path, "empty").close()
    result = kvoffload("inspect", str(tmp_path), "-v")
    ((*_, chunks, stored, used),) = table(result.stdout)
    assert (chunks, stored, used) == ("0", "0 B", "")
    assert "0 chunks\n" in result.stdout
    assert "ago" not in result.stdout


def table(text):
    """The cells of the rows of a table."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


async def test_the_dtype_of_pages_of_sglang_is_that_of_their_pool(tmp_path):
    backend = open_disk(tmp_path, "pages")
    facts = {"model": "m", "kv_dtype": "of the pool", "pool.dtype": "torch.float16"}
    await backend.describe(facts | {"dtype": "torch.bfloat16"})
    await backend.close()
    assert table(kvoffload("inspect", str(tmp_path)).stdout)[0][2] == "float16"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ["large", "small", "empty"]),
        (("--sort", "size"), ["large", "small", "empty"]),
        (("--sort", "age"), ["small", "large", "empty"]),
        (("--sort", "name"), ["empty", "large", "small"]),
    ],
)
async def test_inspect_sorts_a_table_and_shows_all_facts_on_request(tmp_path, words, names):
    facts = {"model": "org/m[7b]", "dtype": "bfloat16", "kv_dtype": "fp8", "zz": "f" * 64}
    for namespace, count in (("large", 5), ("small", 2), ("empty", 0)):
        backend = open_disk(tmp_path, namespace)
        await backend.describe(facts)
        await backend.write(keys_of(count), filled(keys_of(count), SIZE))
        await backend.close()
    held = {
        each["namespace"]: each["folder"]
        for each in answered("inspect", str(tmp_path))["namespaces"]
    }
    for path in (tmp_path / held["small"]).glob("??/*"):
        os.utime(path, (path.stat().st_atime - 7200, path.stat().st_mtime))
    text = kvoffload("inspect", str(tmp_path), *words).stdout
    rows = table(text)
    assert [row[0] for row in rows] == names
    assert ["small", "m[7b]", "fp8", "2", "64.0 KiB", "2.0 h ago"] in rows
    assert "zz=" not in text
    told = kvoffload("inspect", str(tmp_path), *words, "--verbose").stdout
    assert told.count(f"dtype=bfloat16, kv_dtype=fp8, model=org/m[7b], zz={'f' * 64}\n") == 3
    assert all(f"folder {folder}\n" in told for folder in held.values())


async def test_a_digest_is_shown_by_the_digits_that_gc_takes(tmp_path):
    backend = open_disk(tmp_path, "ab" * 32)
    await backend.write(keys_of(1), filled(keys_of(1), SIZE))
    await backend.close()
    ((digits, *_),) = table(kvoffload("inspect", str(tmp_path)).stdout)
    assert len(digits) == 16
    assert answered("gc", str(tmp_path), "--namespace", digits)["removed"] == 1


def aside(root, size=20_000):
    (root / ".quarantine" / "1-aa").write_bytes(bytes(size))
    dead = root / ".writers" / "0123456789abcdef"
    dead.mkdir()
    (dead / "lock").write_text("")
    (dead / "0").write_bytes(bytes(size))
    scratch = root / ".doctor-1-ab"
    (scratch / "inner").mkdir(parents=True)
    (scratch / "inner" / "file").write_bytes(bytes(size))
    os.utime(scratch, (0, 0))
    return [root / ".quarantine" / "1-aa", dead, scratch]


@pytest.mark.parametrize("limits", [(), ("--older-than", "1h")])
def test_a_dry_run_says_exactly_what_the_run_then_does(root, limits):
    useless = aside(root)
    for path in files_of(root)[:2]:
        os.utime(path, (0, 0))
    young = root / ".doctor-2-cd"
    young.mkdir()
    planned = answered("gc", str(root), *limits, "--dry-run")
    assert all(path.exists() for path in useless)
    text = kvoffload("gc", str(root), *limits, "--dry-run").stdout
    assert all(each["path"] in text for each in planned["going"])
    done = answered("gc", str(root), *limits)
    for field in ("removed", "quarantined", "leftovers", "freed_bytes", "kept", "kept_bytes"):
        assert planned[field] == done[field], field
    assert (done["removed"], done["quarantined"], done["leftovers"]) == (2 if limits else 0, 1, 2)
    assert done["kept"] == 9 - done["removed"]
    assert done["freed_bytes"] == done["removed"] * ON_DISK + 3 * 20_480
    assert {each["path"] for each in planned["going"]} >= {str(path) for path in useless}
    assert not any(os.path.exists(each["path"]) for each in planned["going"])
    assert young.exists()


def test_gc_says_what_it_cannot_remove(root):
    (root / ".quarantine" / "2-bb").mkdir()
    report = answered("gc", str(root), code=1)
    assert report["undeletable"] == 1
    assert report["not_removed"][0]["path"].endswith("2-bb")


def test_gc_says_once_why_it_cannot_remove_many(root):
    folders = {str(root / ".quarantine" / f"{i}-cc") for i in range(2, 7)}
    for folder in folders:
        os.mkdir(folder)
    done = kvoffload("gc", str(root))
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if "cannot be removed" in line)
    assert line.startswith("cannot be removed: ")
    assert line.endswith("), and 4 more: --json lists them")
    report = answered("gc", str(root), code=1)
    assert {each["path"] for each in report["not_removed"]} == folders


def test_gc_makes_no_ledger_where_there_is_none(root):
    (root / ".ledger").unlink()
    assert answered("gc", str(root), "--older-than", "0s")["removed"] == 9
    assert not (root / ".ledger").exists()


def test_verify_reports_strays_leftovers_and_a_broken_ledger(root):
    useless = aside(root)
    shard = files_of(root)[0].parent
    strays = [root / "notes.txt", shard / "zz", shard.parent / "other"]
    for path in strays:
        path.write_text("mine")
    report = answered("verify", str(root))
    assert sorted(report["strays"]) == sorted(map(str, strays))
    assert {each["path"] for each in report["leftovers"]} == {str(path) for path in useless[1:]}
    assert report["ledger_fault"] is None
    (root / ".ledger").write_bytes(b"damage" * 10)
    (root / ".bounds.json").write_text("[]")
    report = answered("verify", str(root), "--repair", code=1)
    assert report["ledger_fault"] == "damaged"
    assert report["limits_fault"]
    assert (root / ".ledger").read_bytes() == b"damage" * 10
    text = kvoffload("verify", str(root)).stdout
    assert "ledger damaged" in text
    assert all(f"not of this store: {path}\n" in text for path in strays)
    assert all(path.exists() for path in strays)


def test_verify_names_what_lies_in_place_of_a_chunk_and_why_it_stays(root):
    folder, pipe, link = files_of(root)[:3]
    for path in (folder, pipe, link):
        path.unlink()
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to("/etc/passwd")
    report = answered("verify", str(root), "--repair", code=1)
    assert report["reasons"] == {"corrupt_folder": 1, "corrupt_special": 1, "corrupt_link": 1}
    (left,) = [each for each in report["damaged"] if not each["removed"]]
    assert left["path"] == str(folder)
    assert "by hand" in left["why"]
    text = kvoffload("verify", str(root), "--repair").stdout
    assert f"corrupt_folder: {folder} (left in place: a folder, remove it by hand)\n" in text
    assert os.path.exists("/etc/passwd")


def test_verify_reads_a_part_and_no_faster_than_told(root):
    report = answered("verify", str(root), "--sample", "30%")
    assert (report["chunks"], report["of_chunks"]) == (3, 9)
    report = answered("verify", str(root), "--rate", f"{9 * ON_DISK * 2}B/s")
    assert report["chunks"] == 9
    assert report["seconds"] >= 0.4


def test_paths_and_facts_are_whole_lines_when_piped(root, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    (damaged,) = files_of(root)[:1]
    os.truncate(damaged, 5000)
    assert f"corrupt_size: {damaged} (left in place)\n" in kvoffload("verify", str(root)).stdout
    text = kvoffload("inspect", str(root), "-v").stdout
    assert f"{root}: processes that have it open: 0, none evicts" in text
    assert "dtype=bfloat16, model=llama\n" in text
    text = kvoffload("inspect", str(root)).stdout
    assert all(word in text for word in ("llama", "qwen", "bfloat16", "192.0 KiB", " s ago"))


def test_a_terminal_without_these_characters_is_no_error(root):
    ascii_only = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for path in root.glob("*/manifest.json"):
        path.write_text('{"facts": {"model": "\\u2013caf\\u00e9"}}', encoding="ascii")
    for words in (("inspect",), ("verify",), ("gc", "--dry-run"), ("doctor",)):
        result = process(words[0], str(root), *words[1:], **ascii_only)
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
    assert "model=\\u2013caf\\xe9" in process("inspect", str(root), "-v", **ascii_only).stdout


@pytest.fixture
def foreign(tmp_path_factory):
    """A folder that every user can reach, and a user who is not its owner."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    place = tempfile.mkdtemp(dir="/tmp", prefix="kvoffload-foreign-")
    os.chmod(place, 0o755)
    yield Path(place)
    shutil.rmtree(place)


async def test_another_user_is_told_whose_the_folder_is(foreign):
    backend = open_disk(foreign / "kv", "llama")
    await backend.write(keys_of(3), filled(keys_of(3), SIZE))
    await backend.close()

    def refused(command, *words):
        assert kvoffload(command, str(foreign / "kv")).returncode == 0  # imports everything
        result = as_user(65534, command, str(foreign / "kv"), *words)
        assert result.returncode == 2, result.stdout + result.stderr
        return result.stderr

    for mode in (0o700, 0o755):
        (foreign / "kv").chmod(mode)
        for command in ("inspect", "verify", "gc", "doctor"):
            assert "belongs to user 0, not to 65534; run as that user" in refused(command)
    # A chunk that its folder's user may not read is not one that is damaged.
    give(foreign / "kv", 65534)
    os.chown(files_of(foreign / "kv")[0], 0, 0)
    result = as_user(65534, "verify", str(foreign / "kv"))
    assert "belongs to user 0, not to 65534" in result.stderr


async def test_root_touches_nothing_below_a_folder_of_another_user(foreign):
    """That user may put links there, which root could follow to anywhere."""
    root, theirs = foreign / "kv", foreign / "objects"
    backend = open_disk(root, "llama")
    await backend.write(keys_of(3), filled(keys_of(3), SIZE))
    await backend.close()
    precious = theirs / "ab" / ("ab" * 20)
    precious.parent.mkdir(parents=True)
    precious.write_text("kept")
    (root / ("ab" * 32)).symlink_to(theirs)
    give(root, 65534)
    for words in (("inspect",), ("verify", "--repair"), ("gc", "--older-than", "0s", "--yes")):
        result = kvoffload(words[0], str(root), *words[1:])
        assert result.returncode == 2, result.stdout
        assert "belongs to user 65534, not to 0; run as that user: sudo -u nobody" in result.stderr
    assert precious.read_text() == "kept"
    assert len(files_of(root)) == 3 + 1
    # As that user the link is named, too, and not followed.
    result = as_user(65534, "gc", str(root), "--older-than", "0s", "--yes")
    assert "is a symbolic link" in result.stderr


def give(root, user):
    for path in [root, *root.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)


def test_wrong_paths_are_told_apart(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    for name, problem in (
        ("missing", "does not exist"),
        ("file", "is not a folder"),
        ("file/below", "is below something that is no folder"),
        ("empty", "is empty"),
        ("other", "is no folder of the disk backend"),
    ):
        for command in ("inspect", "verify", "gc"):
            result = kvoffload(command, str(tmp_path / name))
            assert (result.returncode, problem in result.stderr) == (2, True), result.stderr


def test_the_progress_bar_counts_in_the_units_of_the_results(python, root):
    """On a terminal, which only a process with one shows a bar to."""
    master, terminal = pty.openpty()
    program = "from kvoffload.cli.main import main; main()"
    with subprocess.Popen(
        [*python, "-c", program, "verify", str(root)],
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    ) as command:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(master, 4096):
                shown += piece
    os.close(master)
    assert command.returncode == 0
    assert b"288.0/288.0 KiB" in shown
    assert b"MB/s" not in shown
    assert b"kB" not in shown


@pytest.mark.parametrize("width", [80, 60])
def test_a_long_name_of_a_model_leaves_the_namespace_its_column(width, monkeypatch, capsys):
    path = f"/root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-70B/snapshots/{'ab' * 20}"
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("model", "dtype", "chunks", "bytes", "last used")
    cells = (path, "bfloat16", "12,345", "190.1 GiB", "3 s ago")
    print_numbers("1 namespace", "namespace", columns, [("e090c03d671aabb3", cells)], texts=2)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert shown.count("│ e090c03d671aabb3 │") >= 2
    assert path in "".join(re.findall(r"^│[^│]+│ (\S+) +│$", shown, re.MULTILINE))
