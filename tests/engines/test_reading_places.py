"""The search for places that read an engine's configuration."""

import pytest

from tests.engines.reading_places import new_places, readings

OWNERS = {"seed": {"model_config"}, "max_seqs": {"scheduler_config"}, "KV_LAYOUT": {"envs"}}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("config.model_config.seed", "seed"),
        ("get_current_vllm_config().model_config.seed", "seed"),
        ("(c := config.model_config).seed", "seed"),
        ("getattr(draft_model_config, 'seed', 0)", "seed"),
        ("getattr(config, 'model_config').seed", "seed"),
        ("typed.seed", "seed"),
        ("local.seed", "seed"),
        ("anything.max_seqs", "max_seqs"),
        ("envs.KV_LAYOUT", "KV_LAYOUT"),
        ("os.environ['KV_LAYOUT']", "KV_LAYOUT"),
        ("self.max_seqs", None),
        ("params.seed", None),
        ("local.other", None),
    ],
)
def test_a_field_is_found_by_its_owner_or_by_a_name_of_several_words(tmp_path, line, name):
    source = f"""
class Layer:
    def make(self, typed: "ModelConfig | None", config, anything):
        local = config.model_config
        return {line}
"""
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers/one.py").write_text(source)
    (tmp_path / "elsewhere.py").write_text(source)
    found = readings(tmp_path, ["layers", "gone"], OWNERS)
    assert {each: dict(places) for each, places in found.items()} == (
        {name: {"layers/one.py": ["Layer.make:5"]}} if name else {}
    )


def test_a_module_that_reads_a_field_for_the_first_time_is_named_with_its_places(tmp_path):
    (tmp_path / "old.py").write_text("scheduler.max_seqs")
    (tmp_path / "new.py").write_text("def f(x):\n    return x.max_seqs")
    found = readings(tmp_path, ["old.py", "new.py"], OWNERS)
    assert new_places(found, {"max_seqs": {"old.py"}}) == ["max_seqs: new.py (f:2)"]
    assert not new_places(found, {"max_seqs": {"old.py", "new.py"}})
