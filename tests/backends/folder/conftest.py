"""Two mounts of one folder, for tests of the folder backend."""

import pytest

from tests.support.two_mounts import MISSING, two_mounts


@pytest.fixture
def mounts(tmp_path):
    with two_mounts(tmp_path) as paths:
        if paths is None:
            pytest.skip(MISSING)
        yield paths
