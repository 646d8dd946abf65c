# make demo: raw data to a served and proved model, on this machine.   make test: what must hold, but for
# the tests that are marked slow; make test-slow: those, which CI runs too; make test-long: those that CI has no time for,
# run whole before an issue is closed; make test-gpu: those that fail where there is no GPU; make test-cluster: those on a real
# Kubernetes cluster, as root, make test-cluster-slow all of them, but for make test-install-slow: updates and kills of a whole
# installation. All do their own set-up: .venv and the locked dependencies.
#
# make demo-cluster: the demo on the Kubernetes cluster that KUBECONFIG names; make demo-cluster-down removes it.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder --durations=10
INSTALLED := $(VENV)/installed

# Where bytecode may not be kept (many images forbid it), each of the many processes compiles all our modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-long test-gpu test-cluster test-cluster-slow test-install-slow demo-cluster demo-cluster-token demo-cluster-down up down status lint types style walls defs docs bench bench-tracking bench-preparation bench-versions bench-trace bench-training bench-cluster pin-images

demo: $(INSTALLED)
	@$(BIN)/hanzo-ml demo

# OVERLAY=DIR: another one than deploy/kubernetes/overlays/demo, such as one with images of your registry.
demo-cluster: $(INSTALLED)
	@$(BIN)/python -m deploy.demo_cluster up $(if $(OVERLAY),--overlay $(OVERLAY))

demo-cluster-token demo-cluster-down: $(INSTALLED)
	@$(BIN)/python -m deploy.demo_cluster $(@:demo-cluster-%=%) $(if $(OVERLAY),--overlay $(OVERLAY))

test: $(INSTALLED) lint
	@$(PYTEST) -m "not slow and not long and not gpu and not cluster"

test-slow: $(INSTALLED)
	@$(PYTEST) -m "slow and not long and not gpu and not cluster"

test-long: $(INSTALLED)
	@$(PYTEST) -m "long and not gpu and not cluster"

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest -q -m gpu tests/recipes/training

# The first time, the cluster's programs are compiled: half an hour or more.
test-cluster: CHOSEN := cluster and not cluster_slow and not install_slow
test-cluster-slow: CHOSEN := cluster and not install_slow
test-install-slow: CHOSEN := install_slow
test-cluster test-cluster-slow test-install-slow: $(INSTALLED)
	@$(BIN)/python -m tests.cluster up && $(BIN)/python -m pytest -q --durations=10 -m "$(CHOSEN)" tests/cluster; \
		status=$$?; $(BIN)/python -m tests.cluster down; exit $$status

lint: $(INSTALLED)
	@$(MAKE) --no-print-directory --output-sync -j 2 types style walls defs

types: $(INSTALLED)
	@$(BIN)/mypy

style: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

walls: $(INSTALLED)
	@$(BIN)/lint-imports --no-cache

defs: $(INSTALLED)
	@$(BIN)/dg check defs

# Asks the registries of the images that Containerfiles and manifests name; one without an answer keeps its tag.
pin-images: $(INSTALLED)
	@$(BIN)/python deploy/pin_images.py

up down status: $(INSTALLED)
	@$(BIN)/hanzo-ml $@

docs: $(INSTALLED)
	@$(BIN)/python -m docs.generate

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/end_to_end.py

bench-tracking: $(INSTALLED)
	@$(BIN)/python -m benchmarks.tracking

bench-preparation: $(INSTALLED)
	@$(BIN)/python -m benchmarks.preparation

bench-versions: $(INSTALLED)
	@$(BIN)/python -m benchmarks.versions

bench-trace: $(INSTALLED)
	@$(BIN)/python benchmarks/record_trace.py

bench-training: $(INSTALLED)
	@$(BIN)/python benchmarks/training.py

bench-cluster: $(INSTALLED)
	@$(BIN)/python -m tests.cluster up && $(BIN)/python -m benchmarks.cluster; \
		status=$$?; $(BIN)/python -m tests.cluster down; exit $$status

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else 1)' 2>/dev/null || \
		{ echo "error: Hanzo ML needs Python 3.11 to 3.13, and '$(PYTHON)' is not: install it, or name yours: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint requirements.lock --editable '.[dev]'
	@# pip compiles with one processor, which is a third of its time. What no Python 3 compiles nobody imports either.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $(INSTALLED)
