"""The random model of the whole; a seed that fails is the test's parameter, and in its report."""

import pytest

from tests.support.random_model import model

SHORT, LONG = range(3), range(3, 123)


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        *((seed, 3.0) for seed in SHORT),
        *(pytest.param(seed, 6.0, marks=pytest.mark.chaos) for seed in LONG),
    ],
)
def test_whatever_goes_wrong_loaded_bytes_are_right_and_everything_adds_up(
    seed, seconds, tmp_path, monkeypatch
):
    served = model.run(seed, seconds, tmp_path, monkeypatch)
    assert served.compared_while_struck
