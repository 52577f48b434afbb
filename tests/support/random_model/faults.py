"""Everything that goes wrong in the model, at random; ``heal`` ends what would go on."""

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import redis

from kvoffload.connectors.control_server import _Order
from tests.support import file_faults
from tests.support.disk_chunks import stored_in
from tests.support.host_server import ClientProcess
from tests.support.random_model.engine import others


class Faults:
    """The faults of one model.

    Args:
        draw: the only source of chance.
        engines: whose connectors, processes and tiers are struck.
        control: of the hostile tiers.
        roots: folders of the tiers.
        server: of the Redis tier; None if there is none.
        host: the server of the host that the engine attaches to; None if there is none.
        pages: an engine of pages; None if there is none.
    """

    def __init__(self, draw, engines, control, roots, server, host=None, pages=None):
        self._draw = draw
        self._engines = engines
        self._engine = engines[0]
        """The one that is struck."""
        self._control = control
        self._roots = roots
        self._server = server
        self._host = host
        self._host_settings = dict(host.settings) if host is not None else {}
        self._pages = pages
        self.key_files = []
        """Of tiers that encrypt."""
        self.are_files_touched = False
        """Whether files of a tier were damaged or removed: its figures are of before."""
        self._cure = None
        """What lets the server answer again, while it does not."""
        self._stopped = []
        self._starved = []
        """Processes that may open no further file, with their limits of before."""
        self._children = []
        """Forks of this process."""
        self._heal_at_s = 0.0
        self._stranger = self._command = None
        """A process of another engine on the server; a command of an operator."""
        self.log = []
        """What was done, for the report of a failure."""

    def strike(self):
        """Do some things at once, such as a reset and an abort; end what has gone on."""
        if self._heal_at_s and time.monotonic() > self._heal_at_s:
            self.heal()
        kinds = [self.plan, self.plan, self.plan, self.damage, self.remove, self.reset, self.pause]
        kinds += [self.kill, self.stop, self.abort, self.preempt, self.look, self.restart]
        kinds += [self.flush, self.clear, self.cut, self.operate, self.starve, self.fork]
        kinds += [self.freeze, self.change_times]
        weights = [3, 3, 3, 2, 1, 1, 1, 2, 1, 6, 6, 2, 0.5, 2, 1, 1, 0.5, 1, 0.5, 0.5, 1]
        if self._server is not None:
            kinds += [self.pause_server, self.kill_server, self.empty_server, self.damage_values]
            weights += [3, 2, 1, 3]
        if self.key_files:
            kinds += [self.rotate_keys, self.lose_keys]
            weights += [2, 1]
        if self._host is not None:
            kinds += [self.kill_host, self.stop_host, self.reload_host, self.join]
            weights += [3, 2, 1, 2]
        if self._pages is not None:
            kinds += [self._pages.update_weights, self.clear_pages, self.restart_pages]
            weights += [2, 1, 0.5]
        for fault in self._draw.choices(kinds, weights, k=self._draw.choice((1, 1, 2, 4))):
            self.log.append(fault.__name__)
            self._engine = self._draw.choice(self._engines)
            fault()

    def heal(self):
        self._heal_at_s = 0.0
        self._control.set()
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()
        for pid, limits in self._starved[::-1]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        self._starved.clear()
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()
        if self._cure is not None:
            self._cure()
            self._cure = None

    def end(self):
        """Heal, and end the other processes."""
        self.heal()
        self._part()
        if self._command is not None:
            said, _ = self._command.communicate(timeout=120)
            assert self._command.returncode in (0, 1, 2), f"{self._command.args}: {said}"
            assert "Traceback" not in said, f"{self._command.args}: {said}"
            self._command = None

    # ---- tiers ----

    def plan(self):
        """Let calls of tiers fail for a while."""
        draw = self._draw
        plans = [
            {"hang": 0.2, "hang_s": draw.choice((0.3, 1.5))},
            {"slow": 0.5, "slow_s": 0.05},
            {"raises": 0.5},
            {"length": 0.5},
            {"garbage": 0.3},
            {"refuses": 0.5},
            {"disk_slow": 0.05, "disk_slow_s": draw.choice((0.1, 1.0))},
            {"disk_full": 0.7},
            {"disk_fails": 0.2},
            {"disk_stale": 0.05},
            {"disk_tears": 0.3},
            {"policy": 0.2},
            {"copy_slow": 0.3, "copy_slow_s": draw.choice((0.02, 0.3))},
            {"copy_fails": 0.2},
            {"copy_refused": 0.2},
        ]
        chosen = {}
        for each in draw.sample(plans, draw.choice((1, 1, 2, 3))):
            chosen |= each
        self._control.set(**chosen)
        self.log[-1] = f"plan {chosen}"
        self._heal_at_s = time.monotonic() + draw.uniform(0.1, 1.0)

    def damage(self):
        """Turn a bit of many chunks and of tables of slots, cut chunks off, or exchange them.

        The next requests load what is damaged, not what memory has.
        """
        self.are_files_touched = True
        self._damage_tables()
        share = self._draw.choice((0.1, 0.5, 1.0))
        for root in self._roots:
            chunks = [chunk for chunk in stored_in(root) if self._draw.random() < share]
            if self._draw.random() < 0.3:
                _exchange(chunks)
                continue
            for chunk in chunks:
                with contextlib.suppress(OSError, ValueError):  # it is gone, or was cut to nothing
                    if self._draw.random() < 0.2:
                        chunk.cut(self._draw.randrange(chunk.allocated_bytes))
                    else:  # of the header, which ends with its seal, or of what follows it
                        chunk.flip(self._draw.choice((16, 150, 4095, -1, -200)))
        for path in self._some_chunks(4):  # those of other tiers, too
            with contextlib.suppress(OSError):
                file_faults.flip(path, self._draw.randrange(path.stat().st_size or 1))
        for engine in self._engines:
            engine.forget_kept()

    def _damage_tables(self):
        files = [path for root in self._roots for path in _files(root) if path.suffix == ".table"]
        for path in self._draw.sample(files, min(2, len(files))):
            with contextlib.suppress(FileNotFoundError):
                most = min(path.stat().st_size, 1 << 16)  # the first slots are in use, if any are
                file_faults.flip(path, self._draw.randrange(most or 1), self._draw.randrange(8))

    def change_times(self):
        """Let some files be from long ago, or from the future, as after a jump of a clock."""
        for path in self._some_chunks(10):
            then_s = time.time() + self._draw.choice((-1e8, -10.0, 10.0, 1e8))
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (then_s, then_s))

    def remove(self):
        """Remove some chunk files, a namespace, or a whole root."""
        self.are_files_touched = True
        roots = [root for root in self._roots if root.exists()]
        if not roots:
            return
        root = self._draw.choice(roots)
        if self._draw.random() < 0.6:
            for path in self._some_chunks(10):
                path.unlink(missing_ok=True)
        elif self._draw.random() < 0.5:
            for path in list(root.iterdir())[:1]:
                shutil.rmtree(path, ignore_errors=True)
        else:
            gone = root.with_name(f"{root.name}-gone-{time.monotonic_ns()}")
            with contextlib.suppress(OSError):
                root.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _some_chunks(self, most, roots=None):
        roots = self._roots if roots is None else roots
        paths = [path for root in roots for path in _files(root) if len(path.name) > 40]
        return self._draw.sample(paths, min(most, len(paths)))

    def operate(self):
        """Let an operator examine a tier in files while it is used, or remove some of it."""
        roots = [root for root in self._roots if root.name in ("rough", "folder")]
        if not roots or (self._command is not None and self._command.poll() is None):
            return
        root, draw = self._draw.choice(roots), self._draw
        words = draw.choice((["verify"], ["verify", "--repair"], ["gc"]))
        if words == ["gc"]:
            names = [path.name for path in root.glob("*") if len(path.name) == 64]
            which = [["--older-than", "1s"], *(["--namespace", name] for name in names)]
            words = [*words, "--yes", *draw.choice(which)]
        keys = [path for path in self.key_files if path.stem == root.name]
        for path in keys:
            words += ["-o", f'encryption={{"key_file": "{path}"}}']
        words = [sys.executable, "-m", "kvoffload", *words, str(root)]
        self._command = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    # ---- keys ----

    def rotate_keys(self):
        """Let the next stores that open encrypt with a new key, and read with some of the old."""
        for path in self.key_files:
            old = path.read_text().split() if path.exists() else []
            write_keys(path, [new_key(self._draw), *old][: self._draw.choice((1, 2, 4))])

    def lose_keys(self):
        """Let no store open for a while."""
        if self._cure is None:
            for path in self.key_files:
                path.rename(path.with_suffix(".lost"))
            self._falls_ill(self._find_keys)

    def _find_keys(self):
        for path in self.key_files:
            path.with_suffix(".lost").rename(path)

    # ---- the server of the host ----

    def kill_host(self):
        if self._cure is None:
            self._draw.choice((self._host.kill, self._host.kill, self._host.stop))()
            self._falls_ill(self._start_host)

    def _start_host(self):
        """Start it again, maybe with other settings than those of its memory's last server."""
        draw, first = self._draw, self._host_settings
        if draw.random() < 0.5:
            memory = int(first["memory"] * draw.choice((0.5, 1, 2)))
            shares = {"namespace_min": draw.choice((0, memory // 4)), "namespace_max": memory}
            backends = others(draw, first["backends"])
            self._host.settings |= {"memory": memory, "backends": backends, **shares}
            self.log.append("other settings")
            self._host.configure()
        self._host.start()

    def stop_host(self):
        if self._cure is None:
            pid = self._host.process.pid
            os.kill(pid, signal.SIGSTOP)
            self._falls_ill(lambda: os.kill(pid, signal.SIGCONT))
            self._heal_at_s += self._draw.choice((0.0, 2.0))

    def join(self):
        """Let an engine that moves chunks without a pause join in; stop it, or kill it."""
        if self._stranger is None:
            self._stranger = ClientProcess(self._host.path, self._draw.randrange(1 << 30))
        elif self._draw.random() < 0.5:
            self._part()
        else:
            self._stopped.append(self._stranger.process.pid)
            self._stranger.process.send_signal(signal.SIGSTOP)
            self._heal_at_s = time.monotonic() + self._draw.choice((0.2, 3.0))

    def _part(self):
        if self._stranger is not None:
            assert self._stranger.kill() == "", "another engine has wrong bytes"
            self._stranger = None

    def reload_host(self):
        """Take away the backends below the memory, or bring them back."""
        if self._cure is None:
            tiers = self._host.settings["backends"]
            self._host.configure(backends=self._draw.choice(([], tiers)))
            self._host.process.send_signal(signal.SIGHUP)
            self._falls_ill(self._bring_backends)

    def _bring_backends(self):
        self._host.configure()
        self._host.process.send_signal(signal.SIGHUP)

    # ---- the Redis server ----

    def pause_server(self):
        """Let it keep its connections, and answer nothing."""
        if self._cure is None:
            self._server.pause()
            self._falls_ill(self._server.resume)

    def kill_server(self):
        if self._cure is None:
            self._server.kill()
            self._falls_ill(self._server.start)

    def _falls_ill(self, cure):
        self._cure = cure
        self._heal_at_s = time.monotonic() + self._draw.uniform(0.1, 1.5)

    def empty_server(self):
        if self._cure is None:
            with self._client() as client:
                client.flushall()

    def damage_values(self):
        """Overwrite a byte of some values, cut some off, and put some under other names."""
        if self._cure is not None:
            return
        with self._client() as client:
            for _ in range(self._draw.choice((4, client.dbsize()))):
                key, other = client.randomkey(), client.randomkey()
                if key is None or client.type(key) != b"string":
                    return
                damage = self._draw.randrange(3)
                if damage == 0:
                    byte = bytes([self._draw.randrange(256)])
                    client.setrange(key, self._draw.randrange(client.strlen(key) or 1), byte)
                elif damage == 1:
                    client.set(key, client.getrange(key, 0, self._draw.randrange(300)))
                else:
                    client.rename(key, other)

    @contextlib.contextmanager
    def _client(self):
        """Return a client of the server; an error of the server ends the work."""
        with contextlib.suppress(redis.RedisError):
            with redis.Redis(port=self._server.port, socket_timeout=2.0) as client:
                yield client

    # ---- the engine and its I/O process ----

    def reset(self):
        self._engine.reset(waits=self._draw.random() < 0.5)

    def flush(self):
        """End loads without naming them, and let something happen to their requests."""
        self._engine.connector.flush(0.05)
        self._draw.choice((self.abort, self.preempt))()

    def clear(self):
        """Empty a tier or all by an operator's order, which the engine's next steps carry out."""
        operators = self._engine.connector._operators
        if operators.orders.order is None:
            tier = self._draw.choice(("", *operators.facts().tiers))
            operators.orders.order = _Order(operators.clear(tier))

    def pause(self):
        time.sleep(self._draw.uniform(0.02, 0.2))

    def freeze(self):
        """Stop the engine's process for a while, longer than deadlines or not."""
        mine, for_s = os.getpid(), self._draw.choice((0.2, 1.5, 3.0))
        if (child := os.fork()) == 0:
            os.kill(mine, signal.SIGSTOP)
            time.sleep(for_s)
            os.kill(mine, signal.SIGCONT)
            os._exit(0)
        os.waitpid(child, 0)

    def look(self):
        """Ask for all that an operator may see."""
        connector = self._engine.connector
        connector.stats()
        connector.take_events()
        for request in self._engine.waiting[:1]:
            connector.explain(request)

    def abort(self):
        waits = self._engine.waiting and self._draw.random() < 0.2
        if requests := self._engine.waiting if waits else self._with_blocks():
            self._engine.abort(self._draw.choice(requests))

    def preempt(self):
        if requests := self._with_blocks():
            self._engine.preempt(self._draw.choice(requests))

    def _with_blocks(self):
        """Requests that load, or else those that run."""
        loading = list(self._engine.loading.values())
        return loading if loading and self._draw.random() < 0.7 else self._engine.running

    def restart(self):
        """Let an engine end in the midst of all; one that starts on a broken device is told so."""
        if self._draw.random() < 0.5:
            self.heal()
        self._engine.restart(self._draw.choice((0.0, 0.5, 3.0)), self.heal)

    def clear_pages(self):
        self.heal()
        self._pages.clear()

    def restart_pages(self):
        self.heal()
        self._pages.restart()

    def cut(self):
        """Break the connection to the I/O server, maybe in the midst of a message."""
        link = self._io()._link
        with link.lock, contextlib.suppress(OSError):
            if link.is_up:
                if not link._out and self._draw.random() < 0.5:
                    link._sock.send(b"\x09\0\0\0\x91")
                ways = (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)
                link._sock.shutdown(self._draw.choice(ways))

    def kill(self):
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self):
        for pid in self._pids():
            self._stopped.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self._heal_at_s = time.monotonic() + self._draw.choice((0.2, 3.0))

    def starve(self):
        """Let an I/O process, or the server of the host, have few descriptors more, or none."""
        pids = self._pids() if self._host is None else [self._host.process.pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                # One that has just ended has none.
                highest = max(map(int, os.listdir(f"/proc/{pid}/fd")), default=0)
                most, limits = highest + self._draw.choice((1, 4)), resource.RLIMIT_NOFILE
                before = resource.prlimit(pid, limits)
                resource.prlimit(pid, limits, (min(most, before[0]), before[1]))
                self._starved.append((pid, before))
        self._heal_at_s = time.monotonic() + self._draw.uniform(0.1, 1.5)

    def fork(self):
        """Let a child live for a while, with copies of all descriptors of the engine's process."""
        mine = os.getpid()
        if (child := os.fork()) == 0:
            while os.getppid() == mine:
                time.sleep(0.05)
            os._exit(0)
        self._children.append(child)
        self._heal_at_s = time.monotonic() + self._draw.uniform(0.1, 1.5)

    def _io(self):
        """The client of the struck engine, or that of the engine of pages."""
        if self._pages is not None and self._draw.random() < 0.3:
            return self._pages.store._client
        return self._engine.connector._spec.io

    def _pids(self):
        """The I/O process, if it is one and runs."""
        client = self._io()
        return [client._peer.pid] if client._link.is_up and hasattr(client._peer, "pid") else []


def _exchange(chunks):
    """Put chunks in the places of others: of the same key in another namespace, if there is one."""
    for one, other in zip(chunks[::2], chunks[1::2], strict=False):
        with contextlib.suppress(OSError):
            contents = one.content(), other.content()
            if len(contents[0]) == len(contents[1]):
                one.overwrite(0, contents[1])
                other.overwrite(0, contents[0])


def new_key(draw):
    return draw.randbytes(32).hex()


def write_keys(path, keys):
    """Replace a file of keys in one step."""
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text("\n".join(keys))
    draft.rename(path)


def _files(root):
    for folder, _, names in os.walk(root):
        for name in names:
            yield Path(folder, name)
