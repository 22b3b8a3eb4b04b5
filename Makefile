# The two commands of the README are `make demo` and `make test`; each sets up what it needs in .venv.
# CI runs `make test-all` and `make test-without-slurm`. What takes too long for it runs by hand;
# docs/development/by-hand.md says when each last did.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOROVOD := .venv-horovod
# These lists decide what is installed; a change to them installs again.
LISTS := pyproject.toml constraints.txt
# pip prints much: show only the slow parts, and everything if it fails.
SHOW := sed -nu -e 's/^ *Downloading \([^ ]*\) *\((.*)\)/  fetching \1 \2/p' -e 's/^Installing collected.*/  unpacking/p'
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --constraint constraints.txt
# A new .venv has the pip of its Python, which may be older than dependency groups (25.1).
PIP_GROUP := $(PIP) --quiet pip && $(PIP) --group
# Processes that run tests on two cores: most tests wait for other processes. Two of them run the tests of the two labs.
JOBS ?= 4
# Tests start hundreds of Python processes, which load compiled files faster.
unexport PYTHONDONTWRITEBYTECODE
DEMO := allranks run --nproc-per-node 6 examples/six-node/py_exe.py --batch-size 8 --check

# The tests of `make test`; the markers are explained in pyproject.toml.
QUICK := healthy or not (torch or lab or by_hand)
# Tests that could need SLURM or another package of the lab without saying so.
NEAR_SLURM := tests/lab tests/cli tests/host tests/model/test_hostlist.py tests/docs/test_consoles.py tests/launch/queue \
    $(wildcard tests/launch/test_s*.py) tests/launch/test_run_in_slurm.py tests/test_suite.py
# Run as the last command of a target: its row in the table gets the date of today.
RAN_TODAY = @sed -i "/^| .make $@. /s/[^|]*|$$/ $$(date -u +%F) |/" docs/development/by-hand.md

.PHONY: help demo test test-all test-without-slurm test-by-hand lint format bench drills slurm-versions versions horovod \
    mutations mutated-inputs break simulate gpu carry pages docs clean

help:
	@echo "make demo          train a small model on real data with six ranks, and check the result"
	@echo "make test          lint, all tests without torch or a lab, and one healthy job of each kind"
	@echo "                   (at most 6 minutes on 2 cores; JOBS=0 runs one test at a time)"
	@echo "make test-all      all tests except those that run by hand (at most 25 minutes on 2 cores)"
	@echo "make test-without-slurm"
	@echo "                   as root: those tests of 'make test' that could differ on a machine without SLURM"
	@echo "make lint          formatting, types, import contracts"
	@echo "make format        sort imports and format (ruff)"
	@echo "make pages         write the generated pages of docs"
	@echo "make docs          build the documentation site, site/index.html"
	@echo "make clean         remove .venv and caches"
	@echo
	@echo "By hand:"
	@sed -n 's/^| .\(make [a-z-]*\). | \(.*\) | \(.*\) | \(.*\) |$$/\1|\2 (\3; last run: \4)/p' docs/development/by-hand.md \
	    | while IFS="|" read -r what does; do printf '%-18s %s\n' "$$what" "$$does"; done

demo: $(VENV)/.torch
	@echo "$$ $(DEMO)"
	@$(BIN)/$(DEMO)
	@echo
	@echo "Next:  source $(VENV)/bin/activate, and then"
	@echo "  allranks run --nproc-per-node 2 YOUR_SCRIPT.py      any script that torchrun runs"
	@echo "  allranks env --explain                              every value it sets, and why"
	@echo "  less runs/latest/attempt_0/*/rank_0.out             output of rank 0; the other ranks' files are in the same directory"
	@echo "  README.md                                           several nodes, SLURM, cluster.toml"

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "$(QUICK)"

test-all: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 lint $(VENV)/.compiled
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "not by_hand" --durations=40

test-without-slurm: $(VENV)/.dev
	.ci/without-slurm $(BIN)/python -m pytest --numprocesses $(JOBS) \
	    -m "not (torch or lab or by_hand)" $(NEAR_SLURM)

test-by-hand: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m by_hand --durations=40
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "hypothesis and not lab" --hypothesis-profile random
	$(RAN_TODAY)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache >$(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }

# In a new checkout, each process that runs tests would compile all of them: one does it, beside mypy, for all.
$(VENV)/.compiled: $(VENV)/.dev
	@$(BIN)/python -m pytest --collect-only -qq >$(VENV)/collect.log 2>&1 || { cat $(VENV)/collect.log; exit 1; }
	@touch $@

format: $(VENV)/.dev
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bring_up.py
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/next_step.py
	$(BIN)/python benchmarks/roll_call.py
	$(BIN)/python benchmarks/roll_call.py --light
	$(BIN)/python benchmarks/six_nodes.py
	$(BIN)/python benchmarks/log_scan.py
	$(BIN)/python benchmarks/many_files.py
	$(BIN)/python benchmarks/printing.py
	$(RAN_TODAY)

drills: $(VENV)/.dev
	$(BIN)/allranks lab up --name drills --cluster examples/six-node/cluster.toml --login
	$(BIN)/allranks lab drill --name drills --all --healthy 100 --baseline --seed 1 --table docs/evidence/drills.md; code=$$?; \
	    $(BIN)/allranks lab drill --name drills --running --all --baseline --seed 1 --table docs/evidence/drills-running.md \
	    || code=$$?; $(BIN)/allranks lab down --name drills; exit $$code
	$(RAN_TODAY)

# ONLY='24.11 26.05', ONLY='--part tests': these releases, this part; the page keeps the results of the others.
slurm-versions: $(VENV)/.dev
	$(BIN)/python tests/slurm_versions/run.py $(ONLY)
	$(RAN_TODAY)

# Downloads some 2 GB a version. VERSIONS="2.5.1 2.13.0@3.12": these only; RESUME=1: those without a row of today;
# PYTHONS="/path/to/python3.14 ...": interpreters to use beside those on PATH.
versions: $(VENV)/.dev
	$(BIN)/python tests/versions/run.py $(VERSIONS) $(if $(RESUME),--resume) $(addprefix --python ,$(PYTHONS))
	$(RAN_TODAY)

# Horovod has an environment of its own, which sees the packages of .venv.
horovod: $(HOROVOD)/.built
	$(HOROVOD)/bin/python -m pytest tests/hvd -m "by_hand or not by_hand" --numprocesses 0 --durations=20
	$(RAN_TODAY)

$(HOROVOD)/.built: examples/horovod/build.sh | $(VENV)/.dev
	$(PYTHON) -m venv --clear $(HOROVOD)
	echo "$$(pwd)/src:$$(pwd)/$$(echo $(VENV)/lib/python*/site-packages)" | tr : '\n' > $$(echo $(HOROVOD)/lib/python*/site-packages)/allranks.pth
	ln -s $$(pwd)/$(BIN)/py-spy $(HOROVOD)/bin/
	examples/horovod/build.sh $(HOROVOD)/bin/python
	@touch $@

mutations: $(VENV)/.dev
	$(BIN)/python tests/mutations/run.py
	$(RAN_TODAY)

# ONLY='disk/runs': these situations; only a run of all writes the page. REPORT=FILE: what fell, with its output.
break: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m surroundings.run --jobs 2 $(if $(ONLY),--only '$(ONLY)') \
	    $(if $(REPORT),--report '$(abspath $(REPORT))')
	$(RAN_TODAY)

# ONLY='beats joins': these parsers. EACH: inputs for each.
mutated-inputs: $(VENV)/.dev
	$(BIN)/python tests/mutated/run.py $(ONLY) --each $(or $(EACH),100000) --seed $(or $(SEED),1) --jobs 2
	$(RAN_TODAY)

# LIVES: how many; FIRST: the first seed. SEED=646 prints one life.
simulate: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m simulation.run $(if $(SEED),--seed $(SEED),--lives $(or $(LIVES),10000) \
	    --first $(or $(FIRST),0) --jobs 2)
	$(RAN_TODAY)

# No .venv: the GPU's machine has a Python with torch, and mostly no package index. OUT=DIR: a copy of report and logs.
# REHEARSE=1: on the CPU over Gloo, where such a machine is not at hand; small and busy ones need more time.
gpu:
	@$(PYTHON) tests/gpu/run.py $(if $(OUT),--out '$(OUT)') $(if $(ONLY),--only '$(ONLY)') \
	    $(if $(REHEARSE),--rehearse --each-s 240 --total-s 5400)

carry:
	@$(PYTHON) tests/gpu/carry.py --python-version $(or $(CARRY_FOR),3.12)

pages: $(VENV)/.torch
	$(BIN)/python -m allranks.cli.pages docs/reference
	$(BIN)/python tests/docs/tree.py

docs: $(VENV)/.docs $(VENV)/.torch
	$(BIN)/python -m allranks.causes.pages docs .site-docs tests/why
	$(BIN)/zensical build --strict --clean
	@echo "open site/index.html"

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
	@{ $(PIP_GROUP) dev; } 2>$(VENV)/pip.err | $(SHOW) || { cat $(VENV)/pip.err; exit 1; }
	@touch $@

$(VENV)/.docs: $(VENV)/bin/python $(LISTS)
	@echo "installing the site's generator (once)"
	@{ $(PIP_GROUP) docs; } 2>$(VENV)/pip.err | $(SHOW) || { cat $(VENV)/pip.err; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(HOROVOD) site .site-docs .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
