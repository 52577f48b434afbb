"""An engine in a process group of its own, driven by lines of JSON: tests start it and kill it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.preloaded import Fork


def kill_group(leader):
    """Kill a process group at once, and free its shared memory: it can tidy nothing up.

    Left alone, an engine's queues would take hundreds of megabytes until the next boot.
    """
    shared = _shared_memory(leader.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    for file in shared:
        Path(file).unlink(missing_ok=True)


def _shared_memory(group):
    """Return the files of shared memory that processes of a group have mapped."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(folder.name)) == group:
                found |= set(re.findall(r"/dev/shm/[^/\s]+$", (folder / "maps").read_text(), re.M))
    return found


class EngineProcess:
    """Sends orders to a script and waits for its answers.

    The script reads ``{"do": NAME, ...}`` from standard input, a line each. It writes each answer
    as a line ``{"ok": ...}`` to the descriptor in ``ANSWERS_FD``. Nothing else is written there:
    on standard output, lines of the engine's other processes would cut an answer in two.

    Args:
        script: the script.
        settings: its only argument, as JSON.
        log_file: gets what the engine writes to standard output and standard error.
        env: of the script, beside its answers' descriptor.
        python: that runs the script; None: a new one.
    """

    def __init__(self, script, settings, log_file, env, python=None):
        self.log_file = Path(log_file)
        self._log = open(log_file, "w")  # noqa: SIM115 - closed when the engine is
        ours, theirs = os.pipe()
        words = [str(script), json.dumps(settings)]
        if python is None:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                text=True,
                env={**env, "ANSWERS_FD": str(theirs)},
                pass_fds=[theirs],
                start_new_session=True,
            )
        else:
            streams = [subprocess.PIPE, self._log, self._log, theirs]
            self.process = Fork(python, words, streams, env={**env, "ANSWERS_FD": "3"})
        os.close(theirs)
        self._answers = []
        self._came = threading.Condition()
        self._listener = threading.Thread(target=self._listen, args=(ours,), daemon=True)
        self._listener.start()

    def _listen(self, answers_fd):
        with open(answers_fd) as answers:
            for line in answers:
                self._note(json.loads(line)["ok"])
        self._note({"error": "the engine's process has ended"})

    def _note(self, answer):
        with self._came:
            self._answers.append(answer)
            self._came.notify()

    def answer(self, timeout_s=360):
        with self._came:
            if self._came.wait_for(lambda: self._answers, timeout_s):
                return self._answers.pop(0)
        self.process.send_signal(signal.SIGUSR1)  # writes its stacks to the log
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        raise AssertionError(f"no answer in {timeout_s} s; its log ends with\n{self.log[-6000:]}")

    def wait_ready(self):
        started = self.answer(timeout_s=900)
        assert "ready" in started, f"{started}; see {self.log_file}\n{self.log[-3000:]}"
        return self

    def send(self, verb, **arguments):
        self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        self.process.stdin.flush()

    def ask(self, verb, **arguments):
        self.send(verb, **arguments)
        return self.answer()

    @property
    def log(self):
        return self.log_file.read_text(errors="replace")

    def held(self):
        """Count the threads and the descriptors of all processes of the engine."""
        threads = descriptors = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self.process.pid:
                    threads += len(list(folder.joinpath("task").iterdir()))
                    descriptors += len(list(folder.joinpath("fd").iterdir()))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return threads, descriptors

    def kill(self):
        """The whole process group, at once."""
        kill_group(self.process)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._listener.join(5)
        self._log.close()

    def close(self):
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.kill()
