"""Our backends as a secondary tier of vLLM's own ``TieringOffloadingSpec``.

``"secondary_tiers": [{"type": "KVOffloadTier", "module_path": "kvoffload.connectors.vllm",
"backend": "disk", "root": "/nvme/kv", "capacity": "200GiB"}]``.

All fields but ``backend`` and the timeouts are the backend's own options. vLLM drives the tier from
the scheduler's process. Nothing here blocks, and a store that fails is a miss.
"""

import asyncio
import logging
import mmap
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ClassVar

import msgspec
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvoffload import registry
from kvoffload.backends.base import Answers, Observable
from kvoffload.config import convert
from kvoffload.connectors.vllm.tier_loop import IOLoop, presence_on
from kvoffload.connectors.vllm.versions import installed_version
from kvoffload.offload.namespace import Fact, namespace, readable

log = logging.getLogger(__name__)

_ANSWERS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class TierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What belongs to the tier itself; all else goes to the backend."""

    backend: str
    load_timeout_s: float = 5.0
    store_timeout_s: float = 30.0
    lookup_timeout_s: float = 0.25


class KVOffloadTier(SecondaryTierManager):  # type: ignore[misc]  # untyped base
    """A secondary tier kept by any registered backend; rows hold all ranks' bytes of a chunk.

    Raises:
        ConfigError: an unknown backend or option.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    tolerates_off_thread_polling: ClassVar[bool] = True

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        own = {key: config.pop(key) for key in TierOptions.__struct_fields__ if key in config}
        config.pop("module_path", None)
        self._options = convert(own, TierOptions)
        self._rows = primary_kv_view.cast("B")
        self._width = self.block_size_bytes
        facts = tier_facts(offloading_spec, self.block_size_bytes)
        self._backend = registry.open_backend(self._options.backend, config, namespace(**facts))
        self._io = IOLoop()
        self._presence = presence_on(self._io, self._backend, self._options.lookup_timeout_s)
        if isinstance(self._backend, Observable):
            describe = self._backend.describe
            self._io.start(lambda: describe(readable(facts)))
        self._lock = threading.Lock()
        self._running = 0
        self._quiet = threading.Event()
        self._quiet.set()
        self._finished: list[JobResult] = []
        self._abandoned: set[asyncio.Task[Answers]] = set()
        """Calls that were answered as failed and have not ended."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See vLLM; chunks are offered as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See vLLM; RETRY never lasts beyond ``lookup_timeout_s``."""
        try:
            return _ANSWERS[self._presence.holds(key)]
        except Exception:
            log.exception("kvoffload: looking up a chunk failed; taken as a miss")
            return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin writing rows of the primary tier."""
        keys = list(job_metadata.keys)
        rows = self._chunks(job_metadata)
        self._begin(job_metadata, self._options.store_timeout_s, self._backend.write, keys, rows)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin reading into rows of the primary tier."""
        keys = list(job_metadata.keys)
        rows = self._chunks(job_metadata)
        self._begin(job_metadata, self._options.load_timeout_s, self._backend.read, keys, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Keep the engine stepping while jobs run."""
        return self._running > 0

    def drain_jobs(self) -> None:
        """Block until nothing touches the primary tier any more."""
        self._quiet.wait()

    def shutdown(self) -> None:
        """Close the backend and the I/O thread."""
        try:
            self._io.call(self._backend.close(), 5.0)
        except Exception as error:
            log.warning("kvoffload: closing failed: %s", str(error) or type(error).__name__)
        self._io.close()

    def _chunks(self, job: TransferJob) -> list[memoryview]:
        return [self._rows[i * self._width : (i + 1) * self._width] for i in job.chunk_ids.tolist()]

    def _begin(
        self,
        job: TransferJob,
        timeout_s: float,
        call: Callable[[Any, Any], Coroutine[Any, Any, Answers]],
        keys: list[bytes],
        rows: list[memoryview],
    ) -> None:
        with self._lock:
            self._running += 1
            self._quiet.clear()

        async def run() -> None:
            started_s = time.monotonic()
            ok: Answers = [False] * len(keys)
            # vLLM reuses the rows as soon as it has the answer. A call that hangs may access its
            # memory until it ends, so each call has memory of its own.
            copies = own_memory(len(rows), self._width)
            try:
                if not job.is_promotion:
                    for row, copy in zip(rows, copies, strict=True):
                        copy[:] = row
                task = asyncio.ensure_future(call(keys, copies))
                done, _ = await asyncio.wait([task], timeout=timeout_s)
                if not done:
                    task.cancel()
                    self._abandoned.add(task)
                    task.add_done_callback(self._ended_late)
                answers = task.result() if done else []
                ok = answers if len(answers) == len(keys) else ok
                if job.is_promotion:
                    for row, copy, fine in zip(rows, copies, ok, strict=True):
                        if fine:
                            row[:] = copy
            except Exception as error:
                log.warning("kvoffload: %d chunks failed: %s", len(keys), error)
            finally:
                self._end(job, keys, ok, rows, time.monotonic() - started_s)

        self._io.start(run)

    def _ended_late(self, task: "asyncio.Task[Answers]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # was answered long ago

    def _end(
        self,
        job: TransferJob,
        keys: list[bytes],
        ok: Answers,
        rows: list[memoryview],
        seconds: float,
    ) -> None:
        good = [key for key, fine in zip(keys, ok, strict=True) if fine]
        if job.is_promotion:
            self._presence.forget([k for k, fine in zip(keys, ok, strict=True) if not fine])
        result = JobResult(
            job.job_id,
            success=len(good) == len(keys),
            successful_keys=good if job.is_promotion else None,
            transfer_time=seconds,
            transfer_bytes=sum(row.nbytes for row in rows[: len(good)]),
        )
        with self._lock:
            self._finished.append(result)
            self._running -= 1
            if not self._running:
                self._quiet.set()


def own_memory(count: int, num_bytes: int) -> list[memoryview]:
    """Return so many pieces of memory, each beginning on a page if ``num_bytes`` are pages."""
    whole = memoryview(mmap.mmap(-1, max(1, count * num_bytes)))
    return [whole[i * num_bytes : (i + 1) * num_bytes] for i in range(count)]


def tier_facts(spec: Any, row_bytes: int) -> dict[str, Fact]:
    """Collect what vLLM tells a tier of the bytes' meaning.

    Less than our own connector knows: vLLM's configuration for tiers names no revision. Use one
    root for one set of weights.
    """
    config = spec.config
    parallel = config.parallel
    return {
        "engine": "vllm tiering",
        "engine_version": installed_version(),
        "model": config.model.name,
        "kv_dtype": config.model.dtype,
        "kv_layout": config.kv_cache_layout,
        "canonical_layout": config.canonical_layout,
        "groups": "; ".join(
            f"{g.tokens_per_block}: {','.join(g.layer_names)}" for g in config.groups
        ),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "row_bytes": row_bytes,
        "world_size": parallel.world_size,
        "tensor_parallel": parallel.tp_size,
        "pipeline_parallel": parallel.pp_size,
        "prefill_context_parallel": parallel.pcp_size,
        "decode_context_parallel": parallel.dcp_size,
    }
