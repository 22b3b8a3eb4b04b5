# The two commands of the README are `make demo` and `make test`; each sets up what it needs in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The lists that decide what is installed; a change to them installs anew.
LISTS := pyproject.toml constraints.txt
# pip says much; of it, what takes time is shown, and everything if it fails.
SHOW := sed -nu -e 's/^ *Downloading \([^ ]*\) *\((.*)\)/  fetching \1 \2/p' -e 's/^Installing collected.*/  unpacking/p'
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --constraint constraints.txt
# Processes that run tests; one of them has all tests of the lab.
JOBS ?= 2
DEMO := allranks run --nproc-per-node 6 examples/six-node/py_exe.py --batch-size 8 --check

.PHONY: help demo test lint bench drills pages clean

help:
	@echo "make demo    train a small model on real data with six ranks, and prove the result"
	@echo "make test    all checks and tests (about 15 minutes on 2 cores; JOBS=0: one after another, 25)"
	@echo "make lint    formatting, types, import contracts"
	@echo "make bench   the measurements behind the README's claims"
	@echo "make drills  every fault of the lab against allranks and plain torchrun: docs/drills*.md (root; 75 minutes)"
	@echo "make pages   the catalogue's pages: docs/reference/causes"
	@echo "make clean   remove .venv and caches"

demo: $(VENV)/.torch
	@echo "$$ $(DEMO)"
	@$(BIN)/$(DEMO)
	@echo
	@echo "Next:  source $(VENV)/bin/activate, and then"
	@echo "  allranks run --nproc-per-node 2 YOUR_SCRIPT.py      any script that torchrun runs"
	@echo "  allranks env --explain                              every value it sets, and why"
	@echo "  less runs/latest/attempt_0/*/rank_0.out             what rank 0 wrote; the other ranks lie beside it"
	@echo "  README.md                                           several nodes, SLURM, cluster.toml"

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest --numprocesses $(JOBS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache >$(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bring_up.py
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/roll_call.py
	$(BIN)/python benchmarks/six_nodes.py
	$(BIN)/python benchmarks/log_scan.py
	$(BIN)/python benchmarks/many_files.py

drills: $(VENV)/.dev
	$(BIN)/allranks lab up --name drills --cluster examples/six-node/cluster.toml
	$(BIN)/allranks lab drill --name drills --all --healthy 100 --baseline --seed 1 --table docs/drills.md; code=$$?; \
	    $(BIN)/allranks lab drill --name drills --running --all --baseline --seed 1 --table docs/drills-running.md \
	    || code=$$?; $(BIN)/allranks lab down --name drills; exit $$code

pages: $(VENV)/.torch
	$(BIN)/python -m allranks.causes.pages docs/reference/causes

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: $(PYTHON) is Python %d.%d, allranks needs 3.11 or newer; name one: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)

# PyTorch alone is what the demo needs beside allranks itself.
$(VENV)/.torch: $(VENV)/bin/python $(LISTS)
	@echo "installing allranks and PyTorch (once; some 200 MB without CUDA)"
	@$(PIP) --editable '.[torch]' 2>$(VENV)/pip.err | $(SHOW) || { cat $(VENV)/pip.err; exit 1; }
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@echo "installing what the tests need (once)"
	@$(PIP) --editable '.[dev]' 2>$(VENV)/pip.err | $(SHOW) || { cat $(VENV)/pip.err; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
