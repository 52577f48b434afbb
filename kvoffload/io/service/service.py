"""The server of a host: accepts engines, and serves each in a session over shared stores."""

import asyncio
import contextlib
import gc
import logging
import mmap
import os
import select
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from kvoffload import registry
from kvoffload.backends.log_rate import Throttle
from kvoffload.control import check_user, free_name
from kvoffload.errors import ConfigError
from kvoffload.io.greeting import Greeting
from kvoffload.io.open_stores import CLOSE_S
from kvoffload.io.protocol import VERSION, Load, Refused, Store, frame, tiers_of
from kvoffload.io.server import Session
from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.layered_store import MEMORY
from kvoffload.io.service.namespace_shares import NamespaceShares
from kvoffload.io.service.settings import ServeConfig
from kvoffload.io.service.shared_stores import SharedStores
from kvoffload.io.service.systemd import keep_memory, keeps_memory
from kvoffload.metrics.names import (
    ENGINE_LOAD_BYTES,
    ENGINE_LOAD_CHUNKS,
    ENGINE_LOAD_SECONDS,
    ENGINE_STORE_BYTES,
    ENGINE_STORE_CHUNKS,
    ENGINE_STORE_SECONDS,
    ENGINES,
    ENGINES_LEAVING,
)
from kvoffload.metrics.samples import Sample, Traffic
from kvoffload.policies.tenant_order import TenantShares

log = logging.getLogger(__name__)

GREETING_S = 5.0
"""How long an engine may take to say what it is."""
MOST_SESSIONS = 256
"""Each takes descriptors and mappings of this process."""
MOST_SILENT = 64
"""Connections that have said nothing yet: the oldest one is ended for a further one."""
MOST_BYTES = 8 << 20
"""A longer message of an engine is none: it would take this process's memory."""
MOST_KEYS = 1 << 17
"""Of an engine's orders that have not ended, and of its queue: their memory is this process's."""
PAUSE_S = 0.1
MEASURE_S = 0.5
_LOADS = ENGINE_LOAD_BYTES, ENGINE_LOAD_CHUNKS, ENGINE_LOAD_SECONDS
_STORES = ENGINE_STORE_BYTES, ENGINE_STORE_CHUNKS, ENGINE_STORE_SECONDS


class SilentError(OSError):
    """A connection says nothing."""


class EngineTraffic:
    """What one engine has loaded and stored.

    Args:
        name: of the engine: its process, or what it says if the kernel tells none, and a number if
            that is taken.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._of = {Load: Traffic(_LOADS, name), Store: Traffic(_STORES, name)}

    def add(self, order: Load | Store, ok: Sequence[int], seconds: float) -> None:
        """Take in that a job has ended."""
        sizes = order.sizes if isinstance(order.sizes, list) else [order.sizes] * len(ok)
        # Too few sizes are an engine's mistake, and the verdicts say so.
        moved = [size for size, good in zip(sizes, ok, strict=False) if good == 1]
        self._of[type(order)].add(len(moved), sum(moved), seconds)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of both directions."""
        for traffic in self._of.values():
            yield from traffic.samples()


class Service:
    """Serves all engines of a host that attach; made and used on one event loop.

    Args:
        config: the settings.
        memory_fd: the memory of the server before; -1 without one.

    Raises:
        ConfigError: there is not that much memory.
    """

    def __init__(self, config: ServeConfig, memory_fd: int = -1) -> None:
        try:
            policy = registry.load_policy(config.policy)
            tenants = TenantShares(config.tenant_share) if config.tenant_share < 1 else None
            keeps = keeps_memory()
            self.memory = HostMemory(
                config.memory,
                policy,
                lends=config.lend,
                tenants=tenants,
                shares=_shares(config),
                keeps=keeps,
                fd=memory_fd,
            )
            if keeps and self.memory.file and not self.memory.file.is_adopted:
                keep_memory(self.memory.file.fd)
        except OSError as error:
            remedy = f"the system refuses so much memory ({error.strerror}); ask for less"
            raise ConfigError("memory", int(config.memory), remedy) from error
        self._config = config
        self._stores = SharedStores(self.memory, tiers_of(config.backends, MEMORY))
        self.sessions: dict[Session, EngineTraffic] = {}
        """Those that are served → what their engines have moved."""
        self._num_leaving = 0
        """Those of them whose engine has ended or left, while a call uses its memory."""
        self._samples: list[Sample] = []
        self._failures = Throttle(log)
        self._served: set[asyncio.Task[None]] = set()
        self._silent: dict[socket.socket, asyncio.Event] = {}
        """Connections that have said nothing yet, the oldest first → set once it does, or ends."""
        self._may_attach, self._have_left = asyncio.Lock(), asyncio.Event()
        """Held while the stores are replaced; set when the last engine has left."""
        self._loop = asyncio.get_running_loop()
        self._ending = self._loop.create_future()
        """Done once the server ends: nothing waits for engines that are stopped."""

    async def serve(self, listening: socket.socket) -> None:
        """Accept engines until this is cancelled; then end their sessions and close the stores."""
        measuring = self._loop.create_task(self._measure())
        try:
            while True:
                try:
                    sock, _ = await self._loop.sock_accept(listening)
                except OSError as error:  # no descriptor is left
                    log.warning("an engine cannot be accepted: %s", error)
                    await asyncio.sleep(PAUSE_S)
                    continue
                self._spawn(self._attend(sock))
                await asyncio.sleep(0)  # or all that wait would count as engines, and hold the loop
        finally:
            listening.close()  # else an engine would attach once more, to leave at once
            measuring.cancel()
            self._ending.set_result(None)
            for session in list(self.sessions):
                session.end()
            if self._served:
                await asyncio.wait(self._served, timeout=CLOSE_S)
            await self._stores.close()

    def reload(self, config: ServeConfig) -> None:
        """Use other backends from now on: engines leave, and attach again. The memory stays.

        Raises:
            ConfigError: a setting differs that needs another server.
        """
        for name in (name for name in config.__struct_fields__ if name != "backends"):
            now, wanted = getattr(self._config, name), getattr(config, name)
            if wanted != now:
                raise ConfigError(name, wanted, f"is {now!r} until the server is started again")
        if config.backends == self._config.backends:
            return
        self._config = config
        self._spawn(self._replace_stores())

    async def _replace_stores(self) -> None:
        async with self._may_attach:
            self._stores.backends = tiers_of(self._config.backends, MEMORY)
            for session in list(self.sessions):
                session.end()
            if self.sessions:
                self._have_left.clear()
                with contextlib.suppress(TimeoutError):  # one whose call hangs keeps the old ones
                    await asyncio.wait_for(self._have_left.wait(), CLOSE_S)
        log.info("other backends are in use")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _attend(self, sock: socket.socket) -> None:
        """Serve one engine; whatever it does ends its own session alone."""
        with sock:
            try:
                pid, greeting = await self._met(sock)
            except SilentError as error:
                self._failures.warning("a connection is ended: %s", error)
                return
            except OSError as error:
                log.warning("an engine is refused: %s", error)
                return
            with contextlib.closing(greeting):
                if greeting.version == VERSION:
                    async with self._may_attach:  # not to the stores that are being replaced
                        pass
                    told = str(pid or greeting.name)  # 0: it is in a container of its own
                    try:
                        await self._serve_engine(sock, greeting, told)
                    except OSError as error:  # no memory is left to map
                        log.error("engine %s cannot be served: %s", told, error)
                    return
                log.error("engine %d speaks version %d, not %d", pid, greeting.version, VERSION)
                text = f"the server speaks version {VERSION}, the engine {greeting.version}"
                refused = Refused(0, "serve", VERSION, f"{text}: install one kvoffload for both")
                with contextlib.suppress(OSError):
                    sock.send(frame(refused))

    async def _met(self, sock: socket.socket) -> tuple[int, Greeting]:
        """Return the process of an engine and its greeting; raises OSError."""
        pid = check_user(sock, os.geteuid())
        await self._said(sock)
        if not sock.recv(1, socket.MSG_PEEK):
            raise SilentError("it has ended, and had said nothing")
        if len(self._served) - len(self._silent) > MOST_SESSIONS:
            raise OSError(f"{MOST_SESSIONS} engines are attached")
        return pid, Greeting(sock)

    async def _said(self, sock: socket.socket) -> None:
        """Wait until a connection says something; raises SilentError."""
        if _has_said(sock):
            return
        if len(self._silent) >= MOST_SILENT:
            # One that has said something goes on in this turn of the loop.
            oldest = next((each for each in self._silent if not _has_said(each)), None)
            if oldest is not None:
                self._silent.pop(oldest).set()
        ready = self._silent[sock] = asyncio.Event()
        self._loop.add_reader(sock, ready.set)
        try:
            async with asyncio.timeout(GREETING_S):
                await ready.wait()
        except TimeoutError:
            raise SilentError(f"it has said nothing for {GREETING_S:g} s") from None
        finally:
            self._loop.remove_reader(sock)
            is_kept = self._silent.pop(sock, None) is not None
        if not is_kept:
            raise SilentError(f"it has said nothing, as {MOST_SILENT} later ones")

    async def _serve_engine(self, sock: socket.socket, greeting: Greeting, told: str) -> None:
        slab = mmap.mmap(greeting.slab_fd, 0)
        slab.madvise(mmap.MADV_DONTDUMP)  # a core file must not contain clients' data
        with slab_memory(slab) as memory:
            taken = {traffic.name for traffic in self.sessions.values()}
            traffic = EngineTraffic(free_name(told, taken))
            pass_memory = partial(self._pass_memory, greeting)
            session = Session(
                memory, self._stores.open, MOST_BYTES, MOST_KEYS, traffic.add, pass_memory
            )
            await self._serve_session(sock, session, traffic)
        greeting.tell_free()
        if session.loans:  # a copy of the engine may still run, or it is stopped within one
            left = self._loop.create_task(greeting.reads_no_more())
            await asyncio.wait([left, self._ending], return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                session.loans.release_all()
            else:  # the chunks stay marked as on loan, for the next server
                left.cancel()

    def _pass_memory(self, greeting: Greeting) -> bool:
        """Pass the memory to an engine, if it is one to lend; return whether that is so."""
        if not self.memory.lends or not self.memory.file:
            return False
        try:
            greeting.pass_memory(self.memory.file.opened_for_engine())
        except OSError as error:  # no descriptor is left, or the engine has ended
            log.warning("chunks are copied to an engine: the memory cannot be passed: %s", error)
            return False
        return True

    async def _serve_session(
        self, sock: socket.socket, session: Session, traffic: "EngineTraffic"
    ) -> None:
        self.sessions[session], name = traffic, traffic.name
        log.info("engine %s is attached, %d in all", name, len(self.sessions))
        try:
            await session.serve(sock)
        except msgspec.DecodeError as error:
            log.error("engine %s cannot be understood: %s", name, error)
        except Exception:
            log.exception("the session of engine %s failed", name)
        finally:
            # Until a call that hangs has ended, the engine may not use its slots again.
            self._num_leaving += 1
            await session.settled()
            self._num_leaving -= 1
            del self.sessions[session]
            if not self.sessions:
                self._have_left.set()
            log.info("engine %s has left, %d remain", name, len(self.sessions))

    async def _measure(self) -> None:
        """Read the figures of stores, which are asked on this loop alone."""
        while True:
            attached = len(self.sessions) - self._num_leaving
            samples: list[Sample] = [(ENGINES, (), attached)]
            samples.append((ENGINES_LEAVING, (), self._num_leaving))
            for traffic in self.sessions.values():
                samples += traffic.samples()
            try:
                samples += self._stores.samples()
            except Exception as error:  # a plug-in's
                self._failures.warning("the figures of a store cannot be read: %r", error)
            self._samples = samples
            self.memory.end_old_loans()
            await asyncio.sleep(MEASURE_S)

    def samples(self) -> list[Sample]:
        """Return what the server measures, on any thread."""
        return self._samples


def _has_said(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _shares(config: ServeConfig) -> NamespaceShares | None:
    least, most = config.namespace_min, config.namespace_max
    return NamespaceShares(least, most) if least or most is not None else None


@contextlib.contextmanager
def slab_memory(slab: mmap.mmap) -> Iterator[memoryview]:
    """Give a mapping's memory, and unmap it afterwards: it would keep a dead engine's memory."""
    memory = memoryview(slab)
    try:
        yield memory
    finally:
        memory.release()
        try:
            slab.close()
        except BufferError:  # a failed call's traceback has a part of it
            gc.collect()
            with contextlib.suppress(BufferError):
                slab.close()


def run_service(
    config: ServeConfig,
    listening: socket.socket,
    started: Callable[[Service], None],
    memory_fd: int = -1,
) -> None:
    """Serve on this thread until the task is cancelled; see :meth:`Service.serve`.

    Args:
        config: the settings.
        listening: the socket.
        started: called on the loop, in the task that serves, before engines are accepted.
        memory_fd: the memory of the server before; -1 without one.
    """

    async def serve() -> None:
        # For plug-ins' calls of run_in_executor, as with one engine.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2, "kvoffload-io-file"))
        service = Service(config, memory_fd)
        started(service)
        await service.serve(listening)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve())
