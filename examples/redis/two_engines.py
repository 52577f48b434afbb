"""Two engines in two processes, one Redis: what the first computed, the second loads.

Run it: ``python examples/redis/two_engines.py redis://127.0.0.1:6379``. Without a URL it starts a
``redis-server`` of its own while it runs. The engines are small (``kvoffload/demo``),
but real: the same prompt must lead to the same tokens, loaded or computed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
PROMPT = "The tide tables of the western harbour, read aloud. " * 12


def serve(url: str) -> None:
    """Be an engine: answer one prompt, and say what it cost."""
    sys.path.insert(0, str(EXAMPLES))
    from kvoffload.demo import Engine, SamplingParams

    settings = {
        "model": {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2},
        "offload": {
            "cpu_bytes": "64MiB",
            "backends": [{"type": "redis", "url": url, "ttl_s": 600.0}],
        },
    }
    with Engine(settings) as engine:
        (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=16))
        engine.connector.flush()  # so that the other engine finds all of it
    print(
        json.dumps(
            {
                "computed": result.computed_prompt_tokens,
                "loaded": dict(result.cached_tokens),
                "ttft_ms": round(result.ttft_s * 1e3, 1),
                "tokens": result.token_ids,
            }
        )
    )


@contextmanager
def _server() -> Iterator[str]:
    """Run a server with a socket in a folder of its own; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s")
        options = ["--port", "0", "--unixsocket", str(path), "--save", ""]
        server = subprocess.Popen(["redis-server", *options], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            while not path.exists():
                if server.poll() is not None:
                    sys.exit("redis-server has ended")
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            server.terminate()
            server.wait()


def main(url: str | None) -> None:
    """Run two engines, one after the other, and compare what they say."""
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(_server())
        first, second = (_engine(url) for _ in range(2))
    for name, said in (("first", first), ("second", second)):
        print(
            f"{name}: computed {said['computed']} prompt tokens, loaded {said['loaded']}, "
            f"first token after {said['ttft_ms']} ms"
        )
    print(f"same answer: {first['tokens'] == second['tokens']}")


def _engine(url: str) -> dict:
    done = subprocess.run(
        [sys.executable, __file__, "--serve", url], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
