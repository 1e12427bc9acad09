# headrace: `make demo` and `make test` need Python 3.11+, gcc and git, nothing else; both set up what they lack.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints-cpu.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PROTOS := $(wildcard proto/v1/*.proto proto/internal/v1/*.proto)

# Extra words for the installation of torch. Where pip's default index gives a CUDA build (several GB), the much smaller
# CPU build is had from the index that torch's own installation page names: make setup TORCH_ARGS="--index-url ..."
TORCH_ARGS ?=
# ONCE=1: exit after the answer. ARGS: more words for the command.
ONCE ?=
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test unit process nightly gpu simulate lint format docs bench clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: setup ## serve the demo checkpoint, ask it something, show what happened (ONCE=1: then exit)
	@$(BIN)/headrace demo $(if $(filter-out 0,$(ONCE)),--once) $(ARGS)

test: unit ## lint, types and all tests but the slow ones
# Tests between processes wait as often as they compute: lint and types take what they leave.
	@$(MAKE) --no-print-directory -j 2 process lint

unit: setup $(VENV)/.interpreter
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not multinode and not process" $(ARGS)

process: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "process and not slow and not gpu and not multinode" $(ARGS)

nightly: lint $(VENV)/.interpreter ## everything that runs without a GPU, the slow tests too
	HEADRACE_SIM_TRANSFERS=$${HEADRACE_SIM_TRANSFERS:-200000} \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not multinode and not process" $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "process and not gpu and not multinode" $(ARGS)

gpu: ## the tests that need a Hopper GPU, by a Python that has torch with CUDA (PYTHON=...); installs nothing
	PYTHONPATH=.src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -p no:cacheprovider tests/gpu $(ARGS)

simulate: setup ## a million simulated transfers under faults, on all cores (ARGS="--transfers N --seed N --jobs N")
	$(BIN)/python tools/simulate.py $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup ## print the state tables anew
	$(BIN)/python tools/print_states.py > .docs.tmp && mv .docs.tmp docs/states.md

bench: setup ## load over HTTP, disaggregated beside monolithic
	$(BIN)/python benchmarks/serving.py $(ARGS)

setup: $(VENV)/.installed ## the virtual environment with everything in it (the other targets do this themselves)
	@:

clean: ## remove what builds and tests leave behind
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info .src/*.egg-info
	rm -f $(foreach folder,proto/v1 proto/internal/v1,$(folder)/*_pb2.py $(folder)/*_pb2.pyi $(folder)/*_pb2_grpc.py)
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -f $(VENV)/.installed

distclean: clean ## remove the virtual environment as well
	rm -rf $(VENV)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "headrace needs Python 3.11 or later; say which: make PYTHON=/path/to/python3.11"; exit 1; }
	@command -v $${CC:-cc} >/dev/null || command -v gcc >/dev/null \
	    || { echo "headrace compiles its CPU kernels at first use: install gcc"; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.created $(CONSTRAINTS)
	@echo "[2/4] torch (the largest part)"
	@$(PIP) install -c $(CONSTRAINTS) $(TORCH_ARGS) torch==2.13.0
	@touch $@

# The build tools stay in the environment: without isolation an editable install takes seconds, and needs no network.
$(VENV)/.packages: $(VENV)/.torch $(CONSTRAINTS) pyproject.toml
	@echo "[3/4] the other packages"
	@$(PIP) install -c $(CONSTRAINTS) setuptools grpcio-tools
	@$(BIN)/python requirements/wanted.py test > $(VENV)/wanted.txt
	@$(PIP) install -c $(CONSTRAINTS) -r $(VENV)/wanted.txt
	@touch $@

# Large, and for tests alone: the demo does without it.
$(VENV)/.interpreter: $(VENV)/.packages
	@echo "triton, whose interpreter runs the GPU's kernels on a CPU"
	@$(BIN)/python requirements/wanted.py interpreter > $(VENV)/wanted.txt
	@$(PIP) install -c $(CONSTRAINTS) -r $(VENV)/wanted.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.packages setup.py $(PROTOS)
	@echo "[4/4] headrace itself, with its protobuf stubs"
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@
