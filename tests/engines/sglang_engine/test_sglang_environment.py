"""The environment itself: SGLang and HiCache compute, back up and load on a CPU, without us."""


def test_an_engine_answers_and_its_own_storage_serves_it(start, prompt, tmp_path):
    asked = prompt(1)
    plain = start()
    told = plain.generate(asked)
    again = plain.generate(asked)
    assert again["cached"] == [592]
    assert again["tokens"] == told["tokens"]
    assert plain.generate(prompt(2))["tokens"] != told["tokens"]
    plain.kill()

    stored = start("file", env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "file")})
    assert stored.generate(asked)["tokens"] == told["tokens"]
    stored.forget()
    loaded = stored.generate(asked)
    assert loaded["tokens"] == told["tokens"]
    assert loaded["storage"] == [592]
