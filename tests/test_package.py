"""The package as a whole: light to import, layered, and without code in data."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvoffload

PACKAGE = Path(kvoffload.__file__).parent


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_importing_loads_no_torch_and_no_store():
    heavy = ("torch", "numpy", "redis", "asyncio", "aiofiles", "typer", "vllm")
    loaded = run(f"import sys, kvoffload; print(*[m for m in {heavy} if m in sys.modules])")
    assert loaded == []


def test_what_is_public_is_there():
    assert all(hasattr(kvoffload, name) for name in kvoffload.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        kvoffload.nothing_like_it


def test_stored_bytes_are_never_code():
    forbidden = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                names = {ast.unparse(node.func)} & {"eval", "exec", "torch.load"}
            else:
                continue
            assert not names & (forbidden | {"eval", "exec", "torch.load"}), (path, node.lineno)
