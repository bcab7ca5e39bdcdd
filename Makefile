# What can I do here? `make` alone lists it. Every target makes the virtual environment it needs.

PYTHON ?= python3
# Empty: all defaults, which listen on loopback alone.
CONFIG ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLING := $(VENV)/.installing
DEBIAN := .ripresa/debian
PROMETHEUS := $(DEBIAN)/usr/bin/prometheus
KUBECTL := $(DEBIAN)/usr/bin/kubectl

PYTEST := $(BIN)/python -m pytest
# Every test is in exactly one of three tiers.
FAST := not cluster and not slow and not long
CI_SLOW := slow and not cluster and not long
CI_CLUSTER := cluster and not long
LONG := long
# A process a core, each with one torch thread. Clusters have the machine to themselves.
ON_TWO_CORES := --numprocesses 2 --dist worksteal
# Triton fixes at import whether it interprets or compiles, so each way has its own process.
KERNELS := tests/kernels_interp tests/kernels_compile
WITHOUT_KERNELS := $(KERNELS:%=--ignore=%)
INTERPRET := env TRITON_INTERPRET=1
COMPILE := env -u TRITON_INTERPRET

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test test-ci test-long lint bench lock prometheus kubectl clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## Start a local cluster, run an agent loop, stop everything.
	$(BIN)/ripresa demo

serve: $(INSTALLED)  ## Serve until interrupted, by the settings of CONFIG=path if given.
	$(BIN)/ripresa serve $(CONFIG)

test: $(INSTALLED)  ## Fast tests: no cluster, no compile sweeps (under 15 minutes on 2 cores).
	$(COMPILE) $(PYTEST) $(ON_TWO_CORES) -m "$(FAST)" $(WITHOUT_KERNELS)
	$(INTERPRET) $(PYTEST) $(ON_TWO_CORES) -m "$(FAST)" tests/kernels_interp
	$(COMPILE) $(PYTEST) -m "$(FAST)" tests/kernels_compile

test-ci: $(INSTALLED)  ## Tests that start clusters or take long histories (under 40 minutes).
	$(COMPILE) $(PYTEST) $(ON_TWO_CORES) -m "$(CI_SLOW)" $(WITHOUT_KERNELS)
	$(COMPILE) $(PYTEST) -m "$(CI_SLOW)" tests/kernels_compile
	$(COMPILE) $(PYTEST) -m "$(CI_CLUSTER)" $(WITHOUT_KERNELS)

test-long: $(INSTALLED) $(PROMETHEUS) $(KUBECTL)  ## Tests that need minutes or Debian packages.
	$(COMPILE) $(PYTEST) -m "$(LONG)" $(WITHOUT_KERNELS)

lint: $(INSTALLED)  ## Style, formatting, types and import contracts.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)  ## Run every script of tests/bench, each printing its numbers and its machine.
	@missed=; for script in tests/bench/*.py; do \
	  echo "== $$script"; $(BIN)/python $$script || missed="$$missed $$script"; \
	done; test -z "$$missed" || { echo "missed or failed:$$missed" >&2; exit 1; }

prometheus: $(PROMETHEUS)  ## Unpack Debian's prometheus and promtool into .ripresa.

kubectl: $(KUBECTL)  ## Unpack Debian's kubectl into .ripresa.

clean:  ## Remove everything that these targets made, .venv included.
	rm -rf $(VENV) .ripresa dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	find cluster workers kernels protos tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The marker outlives an interrupted install; pip would take a half-written package for a whole
# one, so the next run starts from an empty environment.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'ripresa needs Python 3.11 or newer as $(PYTHON):' \
	    'install one and name it, as in "make PYTHON=python3.12 demo"' >&2; exit 1; }
	@if [ ! -x $(BIN)/python ] || [ -e $(INSTALLING) ]; then \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    echo 'could not make $(VENV); on Debian and Ubuntu: apt-get install python3-venv' >&2; \
	    exit 1; }; \
	fi
	@touch $(INSTALLING)
	$(BIN)/python -m pip install --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(INSTALLING)
	@touch $@

# Unpacked, not installed: no root is needed and nothing is started.
$(PROMETHEUS): PACKAGE := prometheus
$(KUBECTL): PACKAGE := kubernetes-client
$(PROMETHEUS) $(KUBECTL):
	@command -v apt-get >/dev/null || { \
	  echo 'the long tests take $(@F) from a Debian package: run them on Debian or Ubuntu,' \
	    'or install $(@F) yourself and put it into $(@D)' >&2; exit 1; }
	@mkdir -p $(DEBIAN)
	@rm -f $(DEBIAN)/$(PACKAGE)_*.deb
	cd $(DEBIAN) && { apt-get download $(PACKAGE) || { \
	  apt-get update && apt-get download $(PACKAGE); }; }
	dpkg -x $(DEBIAN)/$(PACKAGE)_*.deb $(DEBIAN)
	@touch $@

# Resolves pyproject.toml afresh; keep the triton line by hand, see the lock's first lines.
lock:  ## Write requirements.lock anew with the newest versions that pyproject.toml allows.
	$(PYTHON) -m venv --clear .ripresa/lock
	.ripresa/lock/bin/python -m pip install --quiet 'hatchling>=1.27' '.[dev]' 'torch==2.13.0'
	{ sed -n '/^#/p' requirements.lock; \
	  .ripresa/lock/bin/python -m pip freeze --all --exclude pip --exclude ripresa \
	    | sed -e 's/+cpu$$//' -e '/^triton==/d'; \
	  sed -n '/^triton/p' requirements.lock; } > .ripresa/requirements.lock
	mv .ripresa/requirements.lock requirements.lock
