"""New weights in a running SGLang: no earlier page is loaded, and no later one at a restart."""

import pytest

pytestmark = pytest.mark.timeout(900)


def test_an_update_serves_no_old_page_and_leaves_none_to_a_restart(
    start, make_model, prompt, tiers, disk, tmp_path
):
    old, new = make_model(0), make_model(1)
    before, during = prompt(1), prompt(2)

    def computed(model):
        plain = start(model=model)
        answers = [plain.generate(asked)["tokens"] for asked in (before, during)]
        plain.kill()
        return answers

    of_old, of_new = computed(old), computed(new)
    assert of_old[0] != of_new[0]
    engine = start("dynamic", tiers(disk(tmp_path / "kv")), model=old)
    engine.wait_stored(before, of_old[0])
    assert engine.ask("update", path=new) is True
    answer = engine.generate(before)
    assert answer["tokens"] == of_new[0]
    assert answer["storage"] == [0]
    engine.wait_stored(during, of_new[1])  # a generation has pages of its own
    assert "weights are updated: nothing is loaded or stored" in engine.log
    assert "new weights: pages of earlier weights are not loaded any more" in engine.log
    engine.kill()
    again = start("dynamic", tiers(disk(tmp_path / "kv")), model=old)
    answer = again.generate(during)
    assert answer["tokens"] == of_old[1]
    assert answer["storage"] == [0]
    answer = again.generate(before)
    assert answer["tokens"] == of_old[0]
    assert answer["storage"] != [0]
