"""A rank's half of the tiers on a host of its own: a process with its slab and its I/O process.

What the scheduler's process knows of the stores comes through the rank's reports alone.
"""

import multiprocessing
import pickle

import psutil

from kvoffload.connectors.vllm.worker_presence import WorkerPresence
from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerProcess
from kvoffload.io.protocol import Load, Store
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.host_server import Job
from tests.support.io_rig import opening

SLOT = 4096
NUM_SLOTS = 32


def content(rank, key):
    """The bytes that a rank stores under a key."""
    return (bytes([rank]) + key * SLOT)[:SLOT]


def _main(rank, tier, pipe):
    fd = create_shared_memory(NUM_SLOTS * SLOT)
    slab = Slab(NUM_SLOTS, SLOT, fd)
    wanted = opening([tier], SLOT, namespace=f"{rank:064}")
    client = IOClient(lambda: ServerProcess(fd), wanted, 20.0, 20.0)
    presence = WorkerPresence(rank, client.tiers)
    pipe.send(sorted(presence.listed))
    while True:
        verb, argument = pipe.recv()
        if verb == "server":
            pipe.send(client._peer.pid)
            continue
        if verb == "report":
            if argument:
                presence.ask(argument)
            pipe.send(pickle.dumps((presence.take_parts(), presence.take_answers())))
            continue
        for i, key in enumerate(argument):
            data = content(rank, key) if verb == "store" else bytes(SLOT)
            slab.slot(i, SLOT)[:] = data
        kind = Store if verb == "store" else Load
        order = kind(0, tier[0], list(argument), list(range(len(argument))), SLOT)
        client.begin(order, job := Job())
        job.over.wait()
        right = [slab.slot(i, SLOT) == content(rank, key) for i, key in enumerate(argument)]
        pipe.send([bool(each) and same for each, same in zip(job.ok, right, strict=True)])


class RankOnHost:
    """A host's process; made, asked and killed by the test.

    Args:
        rank: its number.
        tier: name, type and options of its one tier.
    """

    def __init__(self, rank, tier):
        # Not a fork of this process, which has threads; what is imported once need not be again.
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload([__name__])
        self._pipe, other = forking.Pipe()
        self._process = forking.Process(target=_main, args=(rank, tier, other), daemon=True)
        self._process.start()
        other.close()
        self.listed = self._pipe.recv()

    @property
    def server(self):
        """The identifier of this host's I/O process."""
        return self._ask("server", None)

    def _ask(self, verb, argument):
        self._pipe.send((verb, argument))
        assert self._pipe.poll(30), f"no answer to {verb}"
        return self._pipe.recv()

    def report(self, questions):
        """Send questions; return what the worker's next report says."""
        return pickle.loads(self._ask("report", questions))

    def store(self, keys):
        return self._ask("store", keys)

    def load(self, keys):
        return self._ask("load", keys)

    def kill(self):
        """Kill the rank with its I/O process, and wait until both have ended."""
        server = psutil.Process(self.server)
        self._process.kill()
        server.kill()
        self._process.join()
        server.wait(10)
