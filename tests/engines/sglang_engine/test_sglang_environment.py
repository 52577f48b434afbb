"""The environment itself: SGLang and HiCache compute, back up and load on a CPU, without us."""

import pytest

pytestmark = pytest.mark.timeout(900)


def test_an_engine_answers_and_its_own_storage_serves_it(start, prompt, tmp_path, monkeypatch):
    asked = prompt(1)
    plain = start()
    told = plain.generate(asked)
    again = plain.generate(asked)
    assert again["cached"] == [592]
    assert again["tokens"] == told["tokens"]
    assert plain.generate(prompt(2))["tokens"] != told["tokens"]
    plain.kill()

    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file"))
    stored = start("file")
    assert stored.generate(asked)["tokens"] == told["tokens"]
    stored.forget()
    loaded = stored.generate(asked)
    assert loaded["tokens"] == told["tokens"]
    assert loaded["storage"] == [592]
