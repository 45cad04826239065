# `make` lists what there is to run. The only needs are make and Python 3.11 or newer with its venv module.

PYTHON  ?= python3
SEED    ?= 1
CUTS    ?= 10000
KILLS   ?= 200
SERVES  ?= 100
FUZZ    ?= 200000
CLIENTS ?= 50
PIPES   ?= 50
DRIVERS ?= 5
NATS    ?= 20000
HOSTILE ?= 3600

# Whatever the caller's shell says, compiled modules are kept: hundreds of processes import the same ones.
export PYTHONDONTWRITEBYTECODE :=

VENV  ?= .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check lint format bench soak lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## set up, then see the log at work
	@$(BIN)/penstock demo

test: lint ## set up, lint, then run every test
	@$(BIN)/python -m pytest

check: lint ## lint, then the tests that start no process, in a few minutes
	@$(BIN)/python -m pytest -p tests.check

lint: $(READY) ## ruff, mypy, import-linter
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "Run 'make format'." >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >$(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log >&2; exit 1; }
	@echo "lint: clean"

format: $(READY) ## put the code into its one form
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(READY) ## measure against the machine's own limits, nats-server, Redis and what documents promise
	@$(BIN)/python -m bench

soak: $(READY) ## the long proof: SEED=1 CUTS=10000 KILLS=200 SERVES=100 FUZZ=200000 CLIENTS=50 PIPES=50 DRIVERS=5 NATS=20000 HOSTILE=3600
	@$(BIN)/python -m tests.soak --seed $(SEED) --cuts $(CUTS) --kills $(KILLS) --serves $(SERVES) --fuzz $(FUZZ) --clients $(CLIENTS) --pipes $(PIPES) --drivers $(DRIVERS) --nats $(NATS) --hostile $(HOSTILE)
	@$(BIN)/python -m pytest -n 0 -m soak

# Written last and only when all went well, so an interrupted set-up starts again; and so does another PYTHON.
ifneq ($(shell $(PYTHON) -V 2>&1 || :),$(shell $(BIN)/python -V 2>&1 || :))
.PHONY: $(READY)
endif
$(READY): requirements.lock pyproject.toml
	@$(check-python)
	@echo "Setting up $(VENV) (once, and again when the dependencies change) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The oldest Python decides, so that what it pins installs on every newer one. LOCK_FLAGS=--upgrade takes
# the newest of everything; without it only what pyproject.toml asks for moves. Nothing about where the
# packages came from is written down.
lock: ## pin every dependency, with hashes, in requirements.lock
	@$(check-python)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "The lock file is made with Python 3.11: make lock PYTHON=python3.11" >&2; exit 1; }
	@echo "Resolving (minutes when many packages move) ..."
	@set -e; tools=$$(mktemp -d); trap 'rm -rf "$$tools"' EXIT; \
	$(PYTHON) -m venv "$$tools"; \
	"$$tools/bin/python" -m pip install -qq --disable-pip-version-check 'pip-tools>=7.5,<8'; \
	CUSTOM_COMPILE_COMMAND='make lock' "$$tools/bin/python" -m piptools compile --quiet --no-config \
	    --extra dev --extra spark --extra delta --extra demo --extra snappy --extra otel --generate-hashes --allow-unsafe --strip-extras \
	    --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	    $(LOCK_FLAGS) --output-file requirements.lock pyproject.toml

clean: ## remove what was set up, built and cached
	@rm -rf $(VENV) .venv-newest build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# One line that says what to install. It must also run on a Python that is too old, hence no new syntax.
define check-python
command -v $(PYTHON) >/dev/null || \
    { echo "Penstock needs Python 3.11 or newer: install python3.11 and python3.11-venv, or name one with PYTHON=..." >&2; exit 1; }; \
$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; \
sys.version_info >= (3, 11) or sys.exit("Penstock needs Python 3.11 or newer and $(PYTHON) is " + v + ": install python3.11 and python3.11-venv, then make PYTHON=python3.11"); \
import importlib.util as u; \
all(map(u.find_spec, ("venv", "ensurepip"))) or sys.exit("Python " + v + " lacks its venv module: install python" + v + "-venv (its name on Debian and Ubuntu)")'
endef
