"""The namespace: different facts never share it, equal facts always do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.identity import namespace, readable

FACT = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5)
FACTS = st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), FACT, max_size=4)


def spelled(facts):
    return {name: (type(value), value) for name, value in facts.items()}


@given(FACTS, FACTS)
def test_equal_exactly_when_the_facts_are(one, other):
    assert (namespace(**one) == namespace(**other)) == (spelled(one) == spelled(other))


def test_it_is_the_same_in_every_release():
    """A change here makes every user's stored cache unreachable: bump the version on purpose."""
    facts = {"model": "llama", "block_size": 16, "lora": None, "salt": b"\x01", "quantized": False}
    assert namespace(**facts) == (
        "39ab0fe01e572fcf2e820078f8e9898d2bd41e4cb0cbfe2a221cd0a576946cf7"
    )
    assert readable(facts)["salt"] == "01"


def test_what_has_no_one_spelling_is_refused():
    with pytest.raises(TypeError, match="rope"):
        namespace(rope={"theta": 1e6})
