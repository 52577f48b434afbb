"""Fuzz one parser of ``targets.py`` by coverage: ``python tests/fuzz/run.py NAME SECONDS FOLDER``.

The folder gets the corpus, and the input that failed, if there is one. Needs atheris.
"""

import sys
import tempfile
from pathlib import Path

import atheris

MEMORY_MIB = 4096
INPUT_S = 10

tempfile.tempdir = sys.argv[3]  # the fuzzer ends without the end of Python
sys.path.insert(0, str(Path(__file__).parent))
with atheris.instrument_imports(
    include=["kvoffload.backends", "kvoffload.offload.hints", "kvoffload.replay.trace"]
):
    import targets


def main(name: str, seconds: str, folder: str) -> None:
    """Run until the time is over, or an input fails."""
    target = {each.__name__: each for each in targets.TARGETS}[name]
    corpus = Path(folder, "corpus")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.TARGETS[target]):
        (corpus / f"seed{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=4096", f"-artifact_prefix={folder}/"]
    options += [f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={INPUT_S}", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
