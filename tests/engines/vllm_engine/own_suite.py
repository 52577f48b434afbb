"""A pytest plugin for vLLM's own tests of its offloading connector: with our two halves.

vLLM's suite drives a real scheduler with a mocked manager and worker. With this plugin the
connector's halves are ours; the mocks stay. What is tested is that all vLLM expects of the halves
it wrote is true of those we made of them. ``own_suite_files.py`` lists the rest.
"""

import os
import types

import vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker as their_worker
import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector as theirs
from vllm.model_executor.models import registry
from vllm.v1.kv_offload.base import LookupResult

from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.connectors.vllm.worker import KVOffloadWorker
from kvoffload.offload.hints import NO_HINTS


class _Mocked:
    """The part of our adapter that our scheduler calls, over vLLM's mocked manager."""

    changes = 0
    stats = types.SimpleNamespace(is_midway=False)

    def __init__(self, half):
        self.half = half
        self.manager = ManagerAdapter().manager
        self.manager.has_room = lambda keys: True
        self.manager.has_transfers = lambda: True  # no step is left out
        self.refused, self.unplaced = {}, {}

    def note_request(self, context, salt, is_trusted):
        pass

    def hints(self, context):
        return NO_HINTS

    def request_queued(self, list_keys, context, was_preempted=False):
        pass

    def lookup_prefix(self, keys, context):
        hits, pending = 0, False
        for key in keys:
            result = self.half.manager.lookup(key, context)  # some tests replace it
            if result is LookupResult.MISS:
                break
            pending |= result is not LookupResult.HIT
            hits += result is not LookupResult.RETRY
        return hits, pending


class OurScheduler(KVOffloadScheduler):
    made = 0

    def __init__(self, spec, vllm_config, kv_cache_config):
        OurScheduler.made += 1
        settings = read_settings({"cpu_bytes": 1 << 20, "blocks_per_chunk": 1})
        manager = spec.get_manager()
        none = manager.computed = manager.explain = lambda *of_ours: None  # no verbs of vLLM's
        manager.count = none
        manager.manager = ManagerAdapter().manager
        spec.get_manager = lambda: manager
        super().__init__(spec, settings, vllm_config, kv_cache_config)
        self.adapter = _Mocked(self)
        self.waits_for_workers = False  # the mocked ones tell nothing
        self.generations.begin = lambda: None  # and have no tiers to open again

    def _begin_jobs(self, orders):
        pass


class OurWorker(KVOffloadWorker):
    """Registers KV caches as ours does; what they are given to is vLLM's mocked worker."""

    made = 0

    def __init__(self, spec, vllm_config, kv_cache_config):
        OurWorker.made += 1
        super().__init__(
            spec,
            read_settings({"cpu_bytes": 1 << 20, "blocks_per_chunk": 1}),
            vllm_config,
            kv_cache_config,
        )

    def _init_worker(self, kv_caches):
        self.worker = self.spec.get_worker(kv_caches)


registry._run_in_subprocess = lambda look: look()  # see inspected.py
theirs.OffloadingConnectorScheduler = OurScheduler
their_worker.OffloadingConnectorWorker = OurWorker


def pytest_configure(config):
    import tests.v1.kv_connector.unit.utils as utils

    # Its default is a model on a hub; nothing is to be downloaded.
    defaults = utils.create_vllm_config.__defaults__
    utils.create_vllm_config.__defaults__ = (os.environ["KVOFFLOAD_TINY_MODEL"], *defaults[1:])


def pytest_terminal_summary(terminalreporter):
    made = f"{OurScheduler.made} and {OurWorker.made}"
    terminalreporter.write_line(f"our halves were made {made} times")
