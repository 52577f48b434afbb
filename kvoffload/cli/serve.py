"""``kvoffload serve``: the I/O server of a host, which its engines share."""

import asyncio
import logging
import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from kvoffload.cli.output import say
from kvoffload.config import human_bytes
from kvoffload.config_sources import read_file
from kvoffload.control import is_supported
from kvoffload.errors import ConfigError
from kvoffload.io.process import give_way
from kvoffload.io.service import systemd
from kvoffload.io.service.listener import Listener
from kvoffload.io.service.service import Service, run_service
from kvoffload.io.service.settings import read_serve_config
from kvoffload.metrics.endpoint import MetricsServer
from kvoffload.transfer.shared_memory import check_host_memory, explain_huge_pages

log = logging.getLogger(__name__)

LAST_S = 15.0
"""How long the server may take to end once it is told to: a store's call may hang for ever."""


def command(
    config: Annotated[
        str, typer.Option(metavar="FILE", help="The server's settings: TOML, JSON or YAML.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Check the settings and end; nothing is opened.")
    ] = False,
) -> None:
    """Serve all engines of this host from one memory and one set of stores, until it is stopped.

    Engines name its socket in their setting `serve`. Their end costs the server nothing, and its
    end costs them misses. SIGTERM ends it: it closes the stores first. SIGHUP takes other
    `backends` from FILE, and keeps the memory.

    Exit codes: 0 ended as told, 1 it failed, 2 wrong usage or settings.
    """
    settings = read_serve_config(read_file(config, "--config"))
    if check:
        tiers = ", ".join(["memory", *(tier.type for tier in settings.backends)])
        say(f"the settings are right; {human_bytes(settings.memory)} of memory; stores: {tiers}")
        return
    if not is_supported():
        raise ConfigError("socket", settings.socket, "needs Linux, which tells users of sockets")
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=text, stream=sys.stderr)
    passed = systemd.passed()
    kept = 512 * os.fstat(passed.memory).st_blocks if passed.memory >= 0 else 0
    check_host_memory(max(0, settings.memory - kept), "memory")
    give_way()
    endpoints: list[MetricsServer] = []

    def started(service: Service) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _end, task)
        loop.add_signal_handler(signal.SIGHUP, _reload, config, service)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        if settings.metrics_port is not None:
            read, host = service.samples, settings.metrics_host
            endpoints.append(MetricsServer(host, settings.metrics_port, read))
        if service.memory.file is not None:
            explain_huge_pages()
        log.info("engines may attach at %s", settings.socket)
        systemd.tell("READY=1")

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # until it is handled: it would kill
    listener = Listener(settings.socket, passed.socket)
    try:
        run_service(settings, listener.sock, started, passed.memory)
    finally:
        for endpoint in endpoints:
            endpoint.close()
        listener.close()
    os._exit(0)  # without waiting for threads that hang


def _reload(file: str, service: Service) -> None:
    """Let the server use the settings of the file as it is now; wrong ones change nothing."""
    try:
        service.reload(read_serve_config(read_file(file, "--config")))
    except ConfigError as error:
        log.error("the old settings stay: %s", error)


def _end(task: "asyncio.Task[Any] | None") -> None:
    systemd.tell("STOPPING=1")
    last = threading.Timer(LAST_S, os._exit, [0])
    last.daemon = True
    last.start()
    if task is not None:
        task.cancel()
