# 'make demo' and 'make test' work from a clean clone: each makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
# Any torch >= 2.11 works. 'TORCH=' installs none: a new environment then sees the packages of $(PYTHON), and
# VENV may name an environment that has its own, for example 'make demo VENV=$$VIRTUAL_ENV TORCH='.
TORCH ?= torch==2.13.0
# Configurations tried per product in the demo.
TRIALS ?= 5
DEMO ?= .demo
# Processes that test side by side, each on processors of its own; none beside where tests would share a GPU.
WORKERS ?= $(if $(wildcard /dev/nvidia0),0,2)
# The slowest tests that 'make test' names at its end.
DURATIONS ?= 10

# --no-compile: Python compiles what is imported, a small part of all that is installed. It keeps that for the next process,
# whatever the environment says: tests start hundreds of them.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(abspath $(VENV))/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-compile
INSTALL_TORCH = $(if $(strip $(TORCH)),$(PIP) "$(strip $(TORCH))",@:)

.PHONY: help demo test pytest lint style types clean

help:
	@echo "make demo   tune a tiny model's products on the CPU, then train it with what was tuned"
	@echo "make test   lint, type-check and run the tests"
	@echo "make lint   ruff and mypy alone"
	@echo "make clean  remove build outputs and the demo's cache; the environment stays"

demo: $(VENV)/.installed-demo
	@echo "== tune: every product of the tiny model's Newton-Schulz chains, $(TRIALS) configurations each"
	DMUON_TUNE_CACHE_DIR="$(abspath $(DEMO))" $(BIN)/dmuon-tune tune --preset tiny --device cpu --trials $(TRIALS)
	@echo "== train: Muon finds that cache by itself; AdamW from the same start beside it"
	DMUON_TUNE_CACHE_DIR="$(abspath $(DEMO))" $(BIN)/python examples/train_tiny.py --device cpu

test: style
	@$(MAKE) --no-print-directory --jobs 2 pytest types

pytest: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --durations $(DURATIONS)

lint: style types

style: $(VENV)/.installed-test
	$(BIN)/ruff check .

types: $(VENV)/.installed-test
	@rm -rf build
	$(PIP) --no-deps --no-build-isolation --target build/lint .
	cd build/lint && nice $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p dmuon_tune

$(VENV)/.installed-demo: pyproject.toml | $(VENV)/bin/python
	@echo "== install into $(VENV)"
	$(INSTALL_TORCH)
	$(PIP) --editable '.[tilelang]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	@echo "== install into $(VENV)"
	$(INSTALL_TORCH)
	$(PIP) --editable '.[tilelang,cutedsl,triton,report,dev]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is missing or older than 3.11; install Python 3.11 or run make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(if $(strip $(TORCH)),,--system-site-packages) $(VENV)

clean:
	rm -rf build dist *.egg-info "$(DEMO)" .pytest_cache .mypy_cache .ruff_cache .hypothesis
