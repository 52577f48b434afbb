"""A command in a child process: a process whose call hangs in the kernel ends when the call does.

No signal ends such a call. So the parent does nothing that may hang, and ends with the exit code
that its child tells.
"""

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

_ENDS = signal.SIGINT, signal.SIGTERM
_TIDY_S = 3.0
"""How long an interrupted command has to remove what it made, before its caller goes on."""


def run_apart(run: Callable[[], None]) -> None:
    """Run a command, and exit with its code."""
    is_script = threading.active_count() == 1 and sys.stdout is sys.__stdout__
    if not hasattr(os, "fork") or not is_script:
        run()
        return
    here, there = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # until there is a handler of each
    child = os.fork()
    if not child:
        os.close(here)
        _run_and_tell(run, there)
    os.close(there)

    def end(number: int, _: object) -> NoReturn:
        os.kill(child, signal.SIGTERM)
        select.select([here], [], [], _TIDY_S)
        os._exit(128 + number)

    for number in _ENDS:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    if told := os.read(here, 1):
        sys.exit(told[0])
    sys.exit(128 - os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _run_and_tell(run: Callable[[], None], there: int) -> NoReturn:
    code = 1
    try:
        # SIGINT stays blocked: a terminal sends it to the parent, too. A command in the background
        # of a script begins with it ignored: asyncio would leave it so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_caller, args=[there], daemon=True).start()
        run()
        code = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        else:
            code = ending.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        drop_output(1, 2)
        os.write(there, bytes([code]))
        os._exit(0)


def _end_with_caller(there: int) -> None:
    """Wait until no process reads what the command tells, then end it: its caller was killed."""
    unread = select.poll()
    unread.register(there, 0)
    unread.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(*_: object) -> None:
    """Let the command remove what it made, once: as Ctrl+C would, which asyncio takes as a cancel.

    An exception out of nowhere could end what waits for a step, and not the step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    drop_output(1, 2)
    if callable(interrupt := signal.getsignal(signal.SIGINT)):
        interrupt(signal.SIGINT, None)


def drop_output(*streams: int) -> None:
    """Write nowhere from now on: a reader of the output waits for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)
