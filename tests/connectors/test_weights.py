"""Which weights an engine computes with, told by their content."""

import json
import os
import shutil
import sys
import time
import types

import pytest

from kvoffload.connectors.weight_samples import file_digest
from kvoffload.connectors.weights import (
    adapter_digest,
    changes_of,
    commit_of,
    files_digest,
    folder_digest,
    tokenizer_identity,
    was_changed,
    weights_identity,
)

COMMIT, OTHER = "a" * 40, "b" * 40
TENSOR_BYTES = 64 << 10


def write_tensors(file, tensors):
    """Write a safetensors file of byte strings."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def tensors(seed=0):
    return {
        f"layer.{i}": bytes([(seed + i + j) % 251 for j in range(TENSOR_BYTES)]) for i in range(20)
    }


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    write_tensors(made / "model.safetensors", tensors())
    (made / "config.json").write_text("{}")
    return made


def identity(model, **options):
    return weights_identity(options.pop("weights_id", None), str(model), None, **options)


def test_the_setting_precedes_all_else(folder):
    assert identity(folder, weights_id="v7", dummy_seed=1, reads_files=False) == "v7"


def test_random_weights_are_told_by_their_seed(folder):
    assert identity(folder, dummy_seed=0) == "dummy, seed 0"


def test_a_copy_with_other_times_at_another_place_is_the_same_model(folder, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    (copy / "tokenizer.json").write_text("a new chat template needs no new KV")
    (copy / "README.md").write_text("downloaded")
    assert identity(copy) == identity(folder)


def test_a_model_of_links_is_the_model_they_lead_to(folder, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    assert identity(links) == identity(folder)


@pytest.mark.parametrize("changed", [0, 10, 19])
def test_one_changed_tensor_is_another_model_though_size_and_time_are_equal(folder, changed):
    """Merged adapters and training with frozen embeddings leave the beginning of a file as it is;
    images that are built alike have equal times."""
    file = folder / "model.safetensors"
    before, facts = identity(folder), os.stat(file)
    values = tensors()
    name = f"layer.{changed}"
    values[name] = bytes(255 - byte for byte in values[name])
    write_tensors(file, values)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert os.stat(file).st_size == facts.st_size
    assert identity(folder) != before


def test_other_names_of_equal_tensors_are_another_model(folder):
    before = identity(folder)
    values = tensors()
    values["renamed"] = values.pop("layer.19")
    write_tensors(folder / "model.safetensors", values)
    assert identity(folder) != before


@pytest.mark.parametrize(
    "name",
    [
        "preprocessor_config.json",
        "modeling_new.py",
        "quantize_config.json",
        "tekken.json",  # it has sizes of images and rates of audio as well as tokens
        "unheard.of",
    ],
)
def test_any_file_that_is_not_known_to_be_harmless_counts(folder, name):
    before = identity(folder)
    (folder / name).write_text("1")
    first = identity(folder)
    (folder / name).write_text("2")
    assert len({before, first, identity(folder)}) == 3


def test_other_files_than_weights_are_told_without_them(folder, monkeypatch):
    before = files_digest(folder)
    write_tensors(folder / "model.safetensors", tensors(1))
    (folder / "model.safetensors.index.json").write_text("{}")
    assert files_digest(folder) == before
    (folder / "preprocessor_config.json").write_text("{}")
    assert files_digest(folder) != before
    assert files_digest(folder / "no folder") is None
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    assert files_digest(folder) != files_digest(folder)


def test_of_the_generation_config_only_what_a_model_may_read_counts(folder):
    def told(**settings):
        (folder / "generation_config.json").write_text(json.dumps(settings))
        return identity(folder)

    assert told(temperature=0.6) == told(temperature=0.7, top_p=0.9)
    assert told(attn_temperature_tuning=False) != told()


def test_files_without_a_list_of_tensors_are_sampled(tmp_path):
    file = tmp_path / "model.gguf"
    data = bytearray(os.urandom(20 << 20))
    file.write_bytes(data)
    before = folder_digest(tmp_path)
    assert before == folder_digest(str(tmp_path))
    data = bytearray(byte ^ 1 for byte in data)
    file.write_bytes(data)
    assert before
    assert folder_digest(tmp_path) != before


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff" * 8, (1 << 60).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"[1]\n"],
)
def test_a_file_that_is_no_safetensors_file_counts_by_its_bytes(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage)
    first = identity(folder)
    file.write_bytes(damage + b"1")
    assert first != identity(folder)


def sparse_tensors(file, sizes):
    """Write a safetensors file of zeros that takes no room; return where each tensor begins."""
    header, at, starts = {}, 0, []
    for i, size in enumerate(sizes):
        header[f"{i}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        starts.append(at)
        at += size
    text = json.dumps(header).encode()
    with open(file, "wb") as data:
        data.write(len(text).to_bytes(8, "little") + text)
        data.truncate(8 + len(text) + at)
    return [8 + len(text) + start for start in starts], 8 + len(text)


@pytest.mark.parametrize(
    ("sizes", "most_calls", "most_bytes"),
    [
        ([1 << 20] * 3000, 3 * 3000 + 8, 1024 * 3000),
        ([4096] * 3000, 3000 * 4096 // (64 << 10) + 8, 4096 * 3000),
        ([1 << 20, 3584] * 1500, 3 * 1500 + 8, (1024 + 3584) * 1500),
        ([200 << 20] * 50, 3 * 50 + 8, 4096 * 50),
    ],
    ids=["many", "many small", "weights and scales", "few large"],
)
def test_a_tensor_takes_few_reads_of_few_bytes(
    tmp_path, monkeypatch, sizes, most_calls, most_bytes
):
    """The start of an engine waits for it: 60,000 tensors are to take less than 0.3 s."""
    pread, read = os.pread, []

    def counted(fd, length, start):
        read.append(length)
        return pread(fd, length, start)

    _, header_bytes = sparse_tensors(tmp_path / "a.safetensors", sizes)
    monkeypatch.setattr(os, "pread", counted)
    assert file_digest(tmp_path / "a.safetensors")
    assert len(read) <= most_calls
    assert sum(read) - header_bytes <= most_bytes + 64


@pytest.mark.parametrize("size", [1, 300, 4096, 10_000, 1 << 20])
@pytest.mark.parametrize("count", [3, 300])
def test_the_first_and_last_bytes_and_two_places_within_each_tensor_count(tmp_path, size, count):
    file = tmp_path / "a.safetensors"
    starts, _ = sparse_tensors(file, [size] * count)
    before = file_digest(file)
    for start in (starts[0], starts[count // 2], starts[-1]):
        room = size - min(size, 1024 if count == 3 else 256)
        for at in {0, room // 3, room // 3 * 2, size - 1}:
            with open(file, "r+b") as data:
                data.seek(start + at)
                data.write(b"x")
                data.flush()
                assert file_digest(file) != before, (start, at)
                data.seek(start + at)
                data.write(b"\0")
    assert file_digest(file) == before


def test_hostile_places_of_tensors_lead_nowhere(folder):
    header = {"x": {"data_offsets": [-(1 << 70), 1 << 70]}, "y": {"data_offsets": ["0", None]}}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"weights"
    (folder / "model.safetensors").write_bytes(data)
    assert file_digest(folder / "model.safetensors")


def test_a_folder_that_cannot_be_read_tells_nothing(folder, tmp_path, caplog):
    (folder / "more.safetensors").symlink_to(tmp_path / "gone")
    assert folder_digest(folder) is None
    assert "cannot be read" in caplog.text
    assert identity(folder) != identity(folder)
    assert folder_digest(tmp_path / "gone") is None


def test_a_file_that_grows_or_shrinks_while_it_is_read_tells_nothing(folder, monkeypatch):
    file = folder / "model.safetensors"
    pread = os.pread

    def growing(fd, length, start):
        with open(file, "ab") as more:
            more.write(b"x")
        return pread(fd, length, start)

    monkeypatch.setattr(os, "pread", growing)
    assert folder_digest(folder) is None
    monkeypatch.setattr(os, "pread", lambda fd, length, start: pread(fd, length, start)[:-1])
    assert folder_digest(folder) is None


def test_weights_that_files_do_not_tell_are_shared_with_no_other_engine(folder, tmp_path, caplog):
    """A folder of a streamed model has its configuration only."""
    (tmp_path / "streamed").mkdir()
    (tmp_path / "streamed" / "config.json").write_text("{}")
    assert identity(tmp_path / "streamed") != identity(tmp_path / "streamed")
    assert "Set weights_id" in caplog.text
    assert identity(folder, reads_files=False) != identity(folder, reads_files=False)
    assert identity(folder, weights_id="", reads_files=False) != ""
    assert identity(folder, reads_files=False, unknown="told by rank 0") == "told by rank 0"


def test_a_commit_is_enough(monkeypatch):
    assert weights_identity(None, "hub/name", COMMIT) == f"commit {COMMIT}"


def test_a_revision_is_told_by_its_commit_not_by_its_name(monkeypatch, tmp_path):
    """A branch means other weights after an upload, and hubs resolve it to a string of its name."""

    class Resolved(str):
        resolved = COMMIT

    assert commit_of("hub/name", Resolved("main")) == COMMIT
    assert commit_of("hub/name", COMMIT) == COMMIT
    assert commit_of(str(tmp_path), "main") is None

    def cached(model, file, revision):
        return f"/cache/{model}/{revision}/snapshots/{OTHER}/{file}" if revision else None

    hub = types.SimpleNamespace(try_to_load_from_cache=cached)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert commit_of("hub/name", "v1") == OTHER
    assert commit_of("hub/name", None) is None
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert commit_of("hub/name", "v1") is None


def test_files_written_since_an_engine_began_may_not_be_those_it_loaded(folder, tmp_path, caplog):
    now_ns = time.time_ns()
    assert not was_changed(str(folder), now_ns)
    assert was_changed(str(folder), now_ns - 3600 * 10**9)
    assert "after this engine had started" in caplog.text
    assert not was_changed(str(tmp_path / "org/name"), 0)


def switched_link(folder, other):
    link = folder.with_name("current")
    link.symlink_to(folder)
    yield link / "."
    link.with_name("next").symlink_to(other)
    os.replace(link.with_name("next"), link)
    yield None


def moved_folder(folder, other):
    yield folder
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    yield None


def removed_file(folder, other):
    write_tensors(folder / "more.safetensors", tensors())
    yield folder
    (folder / "more.safetensors").unlink()
    yield None


@pytest.mark.parametrize("change", [switched_link, moved_folder, removed_file])
def test_another_folder_under_the_name_since_an_engine_began_may_not_be_the_loaded_one(
    folder, tmp_path, change
):
    """Its files are as old as those that were there, so that none of them tells."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    steps = change(folder, other)
    path = next(steps)
    time.sleep(0.05)  # files' times come from a coarse clock
    begun_ns = time.time_ns()
    assert not was_changed(str(path), begun_ns)
    time.sleep(0.05)
    next(steps)
    assert was_changed(str(path), begun_ns)


def test_weights_in_a_subfolder_count_but_not_earlier_states_and_other_forms(folder):
    before = folder_digest(folder)
    for name in ("original", "onnx", "checkpoint-500", ".cache"):
        (folder / name).mkdir()
        write_tensors(folder / name / "model.safetensors", tensors())
    assert folder_digest(folder) == before
    (folder / "whisper-large-v3").mkdir()
    assert folder_digest(folder) == before
    write_tensors(folder / "whisper-large-v3/model.safetensors", tensors())
    after = folder_digest(folder)
    assert after != before
    write_tensors(folder / "whisper-large-v3/model.safetensors", tensors(1))
    assert folder_digest(folder) not in (before, after)


def test_a_folder_of_the_hubs_cache_is_its_commit(folder, tmp_path):
    snapshot = tmp_path / "models--org--name/snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    assert identity(snapshot) == f"commit {COMMIT}"
    other = tmp_path / "snapshots" / COMMIT
    shutil.copytree(folder, other)
    assert identity(other) == identity(folder)


def test_odd_names_and_files_end_no_start(folder):
    before = identity(folder)
    (folder / "flax_model.msgpack").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    assert identity(folder) == before
    (folder / "more.safetensors").symlink_to("nowhere")
    assert identity(folder).startswith("known to this process alone")
    (folder / "more.safetensors").unlink()
    with open(os.fsencode(folder) + b"/r\xe9sum\xe9.json", "wb") as file:
        file.write(b"{}")
    (folder / "generation_config.json").write_text("[" * 100_000)
    assert identity(folder).startswith("content ")
    text = b"[" * 200_000
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert identity(folder).startswith("content ")


def test_an_adapter_is_told_by_its_content_and_its_files_show_a_change(folder):
    before, facts = adapter_digest(folder), changes_of(folder)
    assert changes_of(folder) == facts
    values = tensors(seed=1)
    write_tensors(folder / "model.safetensors", values)
    assert changes_of(folder) != facts
    assert adapter_digest(folder) != before
    assert adapter_digest(folder / "nothing") is None


def test_weights_in_a_subfolder_that_are_written_after_the_start_are_a_change(folder):
    """The engine may have loaded what was there before."""
    encoder = folder / "whisper"
    encoder.mkdir()
    write_tensors(encoder / "model.safetensors", tensors())
    begun_ns = time.time_ns()
    while time.time_ns() - begun_ns < 20_000_000:
        time.sleep(0.01)  # times of files are coarse
    begun_ns, before = time.time_ns() - 5_000_000, changes_of(folder)
    assert not was_changed(str(folder), begun_ns)
    time.sleep(0.02)
    with open(encoder / "model.safetensors", "r+b") as file:
        file.write(b"other")
    assert was_changed(str(folder), begun_ns)
    assert changes_of(folder) != before


def test_the_settings_of_an_encoder_in_a_subfolder_count(folder):
    encoder = folder / "whisper"
    encoder.mkdir()
    told = []
    for text in ("{}", '{"activation": "gelu"}'):
        (encoder / "config.json").write_text(text)
        told.append(folder_digest(folder))
    named = files_digest(folder)
    (encoder / "tokenizer.json").write_text("{}")
    assert files_digest(folder) == named
    (encoder / "config.json").write_text("{}")
    assert files_digest(folder) != named
    (encoder / "config.json").write_text(text)
    assert folder_digest(folder) == told[1] != told[0]
    (folder / "model.safetensors").unlink()
    assert folder_digest(folder) is None


def test_a_tokenizer_is_told_by_its_commit_or_its_files(folder, tmp_path):
    assert tokenizer_identity("hub/name", COMMIT) == f"commit {COMMIT}"
    assert tokenizer_identity(str(folder), None) != tokenizer_identity(str(folder), None)
    (folder / "tokenizer.json").write_text("1")
    first = tokenizer_identity(str(folder), None)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert tokenizer_identity(str(copy), "main") == first
    (folder / "added_tokens.json").write_text("{}")
    assert tokenizer_identity(str(folder), None) != first
