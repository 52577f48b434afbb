"""Short ways to make a trace and to replay it."""

from kvoffload.replay.simulate import Level, replay_levels
from kvoffload.replay.synthetic import timed
from kvoffload.replay.trace import from_timed


def from_ids(name, requests):
    """Make a trace of requests given by block ids, without times."""
    return from_timed(name, ((0.0, ids) for ids in requests))


def generate(name, options):
    """Make the requests of a workload."""
    return (request for _, request in timed(name, options))


def replay(requests, policy, capacity, progress=None):
    """Use one store of ``capacity`` blocks; the policy must be new."""
    return replay_levels(requests, [Level("", capacity, policy)], progress)
