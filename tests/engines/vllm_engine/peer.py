"""vLLM's own tiering made to run on a CPU, to be compared with: its copies done by torch.

Everything but the copies between the KV cache and host memory is vLLM's: scheduler and worker
halves, primary tier, file tier. ``fail_after`` in the extra config makes one transfer fail.
"""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` whose worker needs no GPU."""

    def get_worker(self, kv_caches):
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _Worker(kv_caches, region, int(self.extra_config.get("fail_after", 0)))


class _Worker(OffloadingWorker):
    def __init__(self, kv_caches, region, fail_after):
        self._pairs = [
            (tensor.tensor, region.create_next_worker_view(tensor.page_size_bytes))
            for tensor in kv_caches.tensors
        ]
        self._finished = []
        self._left = fail_after

    def submit_store(self, job_id, src_spec, dst_spec):
        for blocks, rows in self._pairs:
            rows[dst_spec.chunk_ids.tolist()] = blocks[src_spec.block_ids.tolist()]
        return self._done(job_id)

    def submit_load(self, job_id, src_spec, dst_spec):
        for blocks, rows in self._pairs:
            blocks[dst_spec.block_ids.tolist()] = rows[src_spec.chunk_ids.tolist()]
        return self._done(job_id)

    def _done(self, job_id):
        self._left -= 1
        self._finished.append(TransferResult(job_id, self._left != 0, 0, 0.0))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass
