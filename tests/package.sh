#!/usr/bin/env bash
# What people install: the source archive, in an empty environment, away from the checkout.
# Run by `make test-package`; the argument is the Python of the development environment.
set -euo pipefail
cd "$(dirname "$0")/.."
dev=$PWD/${1:-.venv/bin/python}
constraints=$PWD/constraints.txt
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

"$dev" -m hatchling build -t sdist -d "$out"
"$dev" -m venv "$out/venv"
cd "$out"
unset PYTHONPATH
export PATH="$out/venv/bin:$PATH"
python -m pip install --quiet --disable-pip-version-check -c "$constraints" \
  "kvoffload[cli] @ file://$(echo "$out"/kvoffload-*.tar.gz)"

kvoffload --version
kvoffload bench --help >bench-help
kvoffload demo --quick
python - <<'PYTHON'
import asyncio

from kvoffload import open_backend


async def store() -> None:
    backend = open_backend("disk", {"root": "kv", "capacity": "1GiB", "min_free": 0}, namespace="package")
    assert await backend.write([b"key"], [memoryview(b"bytes" * 1000)]) == [True]
    await backend.close()


asyncio.run(store())
PYTHON
kvoffload inspect kv
kvoffload verify kv
