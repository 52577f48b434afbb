"""Requests that run in the background while a test does something else."""

import queue
import threading


class Traffic:
    """Requests that go on by themselves, two at a time; each answer is compared with what is right.

    GPU memory is made to forget before each pair, so that it is asked of the tiers below. Limits
    are for what never ends: they are far beyond what the slowest machine takes.
    """

    def __init__(self, engine, prompts, told):
        self.engine, self.prompts, self.told = engine, prompts, told
        self.finished = 0
        self.cached = 0
        """Prompt tokens that were not computed, of all requests so far."""
        self._between = queue.SimpleQueue()
        self._stop = False
        self._failure = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, *_):
        self._stop = True
        self._thread.join(400)
        assert not self._thread.is_alive(), "a request never finished"
        if kind is None:
            self._raise()

    def wait_for(self, count, limit_s=600):
        """Wait until so many more requests have finished, all of them rightly."""
        goal = self.finished + count
        self._wait(lambda: self.finished >= goal, limit_s)

    def wait_for_hits(self, tokens, limit_s=600):
        """Wait until so many prompt tokens have been loaded instead of computed."""
        self._wait(lambda: self.cached >= tokens, limit_s)

    def between_pairs(self, act, limit_s=600):
        """Call ``act`` after a pair of requests, before the next; return when that one is over."""
        done = []
        self._between.put(lambda: done.append(act()))
        self._wait(lambda: done, limit_s)

    def _wait(self, reached, limit_s):
        with self._news:
            in_time = self._news.wait_for(lambda: reached() or self._failure, limit_s)
        self._raise()
        assert in_time, f"{self.finished} requests finished, {self.cached} tokens loaded"

    def _raise(self):
        if self._failure is not None:
            raise AssertionError("a request failed under way") from self._failure

    def _run(self):
        at = 0
        try:
            while not self._stop:
                pair = [(at + i) % len(self.prompts) for i in range(2)]
                at += 2
                self.engine.ask("reset")
                while not self._between.empty():
                    self._between.get()()
                answer = self.engine.generate([self.prompts[i] for i in pair], limit_s=300)
                assert answer["reasons"] == ["length"] * 2
                assert answer["tokens"] == [self.told[i] for i in pair]
                with self._news:
                    self.finished += 2
                    self.cached += sum(answer["cached"])
                    self._news.notify()
        except Exception as error:
            with self._news:
                self._failure = error
                self._news.notify()
