"""Flat copies of pages, and a storage that is detached, attached and cleared while serving."""

import json
import socket

import pytest

from tests.support.redis_server import free_port

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
BIND_4 = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}


def attaching(extra):
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
    }


def test_flat_pages_and_storage_attached_while_serving(start, prompt, tiers, disk, tmp_path):
    extra = tiers(disk(tmp_path / "kv"), interface_v1=0, allow_clear=True)
    engine = start("dynamic", extra)
    asked = prompt(1)
    told = engine.generate(asked)["tokens"]
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="detach") is True
    engine.forget()
    answer = engine.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] == [0]
    assert engine.ask("storage", action="attach", **attaching(extra)) is True
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="clear") is True
    other = prompt(2)
    told = engine.generate(other)["tokens"]
    engine.wait_stored(other, told)


def test_an_attach_that_one_rank_refuses_is_taken_back_on_all(start, prompt, tiers, disk, tmp_path):
    """SGLang answers for rank 0; a request would end the engine if the other one had no storage."""
    engine = start("dynamic", tiers(disk(tmp_path / "kv")), tp_size=2, env=BIND)
    asked = prompt(1)
    told = engine.generate(asked)["tokens"]
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="detach") is True
    port = free_port()
    attach = attaching(tiers(disk(tmp_path / "kv"), metrics_port=port))
    with socket.create_server(("127.0.0.1", port + 1)):  # that of rank 1
        assert engine.ask("storage", action="attach", **attach) is False
        assert "could not be attached by another rank" in engine.log
        engine.forget()
        assert engine.generate(asked)["tokens"] == told
    assert engine.ask("storage", action="attach", **attach) is True
    engine.wait_stored(asked, told)


def test_pipeline_stages_attach_no_storage_while_serving(start, prompt, tiers, disk, tmp_path):
    """SGLang's first stage would wait for the second one, which waits for the first one."""
    extra = tiers(disk(tmp_path / "kv"))
    engine = start("dynamic", extra, pp_size=2, env=BIND)
    asked = prompt(1)
    told = engine.generate(asked)["tokens"]
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="detach") is True
    assert engine.ask("storage", action="attach", **attaching(extra)) is False
    assert "set --hicache-storage-backend at the start" in engine.log
    assert engine.generate(asked)["tokens"] == told


def test_ranks_of_parallel_attention_attach_no_storage_while_serving(start, tiers, disk, tmp_path):
    """One with a request rejects the call; the idle ones would wait for it, and it for them."""
    extra = tiers(disk(tmp_path / "kv"))
    sizes = {"tp_size": 4, "attn_dp_size": 2}
    engine = start("dynamic", extra, env=BIND_4, **sizes)
    assert engine.ask("storage", action="detach") is True
    assert engine.ask("storage", action="attach", **attaching(extra)) is False
    assert "set --hicache-storage-backend at the start" in engine.log
