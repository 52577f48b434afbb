"""Tiers that could never be of use are refused at start; what a reset leaves behind is removed."""

import logging
import os
import re

import pytest
from disk_commands import kvoffload

from kvoffload.errors import ConfigError
from tests.support.disk_chunks import stored_in

BLOCK = 4


def disk(root, capacity="1MiB"):
    return {"type": "disk", "root": str(root), "capacity": capacity, "min_free": 0}


def store(connector, request):
    count = request.num_tokens // BLOCK
    connector.after_forward(request, [range(5, 5 + count)], count * BLOCK)
    assert connector.flush()
    connector.request_finished(request)


def test_a_capacity_below_one_chunk_is_refused_by_name(connect, tmp_path):
    with pytest.raises(ConfigError) as caught:
        connect(disk(tmp_path / "a"), disk(tmp_path / "b", capacity="5KiB"))
    assert caught.value.field == "backends[1].capacity"
    assert caught.value.value == "5.0 KiB"
    assert "8.0 KiB" in caught.value.remedy
    connect(disk(tmp_path / "b", capacity="8KiB")).close()


def test_two_tiers_on_one_root_are_refused_by_name(connect, tmp_path):
    (tmp_path / "way").symlink_to(tmp_path)
    with pytest.raises(ConfigError) as caught:
        connect(disk(tmp_path / "kv"), disk(tmp_path / "way" / "kv"))
    assert caught.value.field == "backends[1]"
    assert caught.value.value == str((tmp_path / "kv").resolve())
    assert "backends[0]" in caught.value.remedy


def test_a_reset_says_that_tiers_are_not_erased_and_what_erases_them(
    connect, new_request, tmp_path, caplog
):
    connector = connect(disk(tmp_path))
    store(connector, new_request("p", 41))
    with caplog.at_level(logging.INFO, "kvoffload"):
        connector.reset_cache()
    (line,) = [message for message in caplog.messages if message.startswith("reset: ")]
    assert "do not erase it" in line
    connector.close()
    (command,) = re.findall(r"kvoffload gc STORE (--namespace \S+)", line)
    assert "removed 5 chunks" in kvoffload("gc", str(tmp_path), *command.split()).stdout
    assert not stored_in(tmp_path)


def test_an_old_generation_is_removed_and_what_others_share_is_left(
    connect, new_request, until, tmp_path
):
    connector = connect(disk(tmp_path))
    replica = connect(disk(tmp_path))

    def folders():
        return sorted(name for name in os.listdir(tmp_path) if not name.startswith("."))

    request = new_request("p", 41)
    store(connector, request)
    (shared,) = folders()
    connector.reset_cache()
    store(connector, request)
    (first,) = set(folders()) - {shared}
    assert stored_in(tmp_path / first)
    connector.reset_cache()
    store(connector, request)
    until(lambda: first not in folders())
    assert len(folders()) == 2
    assert len(stored_in(tmp_path / shared)) == 5
    # A reset of one engine costs its replicas nothing.
    until(lambda: replica.get_num_new_matched_tokens(new_request("p", 41), 0) == 40)
