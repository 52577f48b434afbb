"""An engine that tests kill leaves nothing behind that outlives its processes."""

from pathlib import Path

from tests.support.engine_process import EngineProcess

SCRIPT = """
import json, os, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=4096)
os.write(int(os.environ["ANSWERS_FD"]), json.dumps({"ok": memory.name}).encode() + b"\\n")
time.sleep(600)
"""


def test_shared_memory_of_a_killed_engine_is_freed(tmp_path):
    """Else the memory of each is gone until the next boot, some hundred megabytes with vLLM."""
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    engine = EngineProcess(script, {}, tmp_path / "log", {})
    file = Path("/dev/shm", engine.answer())
    assert file.exists()
    engine.kill()
    assert not file.exists()
