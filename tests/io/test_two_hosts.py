"""Two ranks on two hosts: what their stores hold, the scheduler knows from their reports alone.

Each host is a process with a slab and an I/O process of its own. They share a folder or a Redis.
"""

import os
import signal

import pytest

from kvoffload.config import parse_config
from kvoffload.connectors.vllm.rank_tiers import RankTiers
from kvoffload.testing.backends import keys_of
from tests.support.rank_on_host import RankOnHost

KEYS = keys_of(12)


class Ranks:
    """Both hosts, and the scheduler's view of them."""

    def __init__(self, kind, options):
        self.hosts = [RankOnHost(rank, (kind, kind, options)) for rank in range(2)]
        tiers = {"backends": [{"type": kind, **options}], "lookup_timeout_s": 20.0}
        config = parse_config({"cpu_bytes": 1 << 20, **tiers})
        self.tiers = RankTiers(config, [0, 1], self.hosts[0].listed)

    def step(self):
        questions = self.tiers.take_questions()
        for host in self.hosts:
            self.tiers.apply(*host.report(questions))

    def holds(self, keys, until):
        """Look keys up until the reports have said what there is of each."""
        (presence,) = self.tiers.presences.values()

        def answers():
            found = [presence.holds(key) for key in keys]
            self.step()
            return None if None in found else found

        return until(answers)

    def kill(self):
        for host in self.hosts:
            host.kill()


@pytest.fixture(params=["disk", pytest.param("redis", marks=pytest.mark.chaos)])
def start(request, tmp_path):
    """Start two hosts on one folder or server; those that live are killed after the test."""
    made = []
    if request.param == "disk":
        options = {"root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    else:
        patient = dict.fromkeys(("timeout_s", "connect_timeout_s", "lookup_timeout_s"), 5.0)
        options = {"url": request.getfixturevalue("own_redis").url, **patient}

    def start():
        made.append(Ranks(request.param, options))
        return made[-1]

    yield start
    made[-1].kill()


def test_a_restart_hits_again_what_all_hosts_had_stored(start, until):
    ranks = start()
    for host in ranks.hosts:
        assert host.store(KEYS[:8]) == [True] * 8
    assert ranks.hosts[1].store(KEYS[8:10]) == [True] * 2
    assert len({host.server for host in ranks.hosts}) == 2
    ranks.kill()
    again = start()
    assert again.holds(KEYS, until) == [True] * 8 + [False] * 4
    for host in again.hosts:
        assert host.load(KEYS[:8]) == [True] * 8


def test_the_io_process_of_one_host_dies_and_both_hosts_hit_again(start, until):
    ranks = start()
    for host in ranks.hosts:
        assert host.store(KEYS) == [True] * 12
    assert until(lambda: all(ranks.holds(KEYS, until)))
    victim, other = (host.server for host in ranks.hosts)
    os.kill(victim, signal.SIGKILL)
    until(lambda: ranks.hosts[0].server != victim)
    until(lambda: all(ranks.holds(KEYS, until)) and all(ranks.hosts[0].load(KEYS)))
    assert ranks.hosts[1].load(KEYS) == [True] * 12
    assert ranks.hosts[1].server == other
