# `make` lists the targets. Requires only make and Python 3.11 or newer with its venv module.

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
CLUSTER ?= 10000

# Keep compiled modules whatever the caller's shell says: hundreds of processes import them.
export PYTHONDONTWRITEBYTECODE :=

VENV  ?= .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check lint format bench soak lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## run the demo
	@$(BIN)/penstock demo

test: lint ## lint, then run every test
	@$(BIN)/python -m pytest

check: lint ## lint, then run the tests that start no process, in about a minute
	@$(BIN)/python -m pytest -p tests.check

lint: $(READY) ## run ruff, mypy and import-linter
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "Run 'make format'." >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >$(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log >&2; exit 1; }
	@echo "lint: clean"

format: $(READY) ## format the code and apply safe fixes
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(READY) ## measure against the machine's limits, nats-server, Redis and documented figures
	@$(BIN)/python -m bench

soak: $(READY) ## run the long tests: SEED=1 CUTS=10000 KILLS=200 SERVES=100 FUZZ=200000 CLIENTS=50 PIPES=50 DRIVERS=5 NATS=20000 HOSTILE=3600 CLUSTER=10000
	@$(BIN)/python -m tests.soak --seed $(SEED) --cuts $(CUTS) --kills $(KILLS) --serves $(SERVES) --fuzz $(FUZZ) --clients $(CLIENTS) --pipes $(PIPES) --drivers $(DRIVERS) --nats $(NATS) --hostile $(HOSTILE) --cluster $(CLUSTER)
	@$(BIN)/python -m pytest -n 0 -m soak

# Written last and only on success, so an interrupted set-up starts again. Another PYTHON also sets up again.
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

# The oldest supported Python resolves the pins, so that they install on every newer one. LOCK_FLAGS=--upgrade takes the
# newest versions; without it only changes of pyproject.toml take effect. The package index is not recorded.
lock: ## pin every dependency, with hashes, in requirements.lock
	@$(check-python)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "The lock file needs Python 3.11: make lock PYTHON=python3.11" >&2; exit 1; }
	@echo "Resolving (minutes when many packages move) ..."
	@set -e; tools=$$(mktemp -d); trap 'rm -rf "$$tools"' EXIT; \
	$(PYTHON) -m venv "$$tools"; \
	"$$tools/bin/python" -m pip install -qq --disable-pip-version-check 'pip-tools>=7.5,<8'; \
	CUSTOM_COMPILE_COMMAND='make lock' "$$tools/bin/python" -m piptools compile --quiet --no-config \
	    --extra dev --extra spark --extra delta --extra demo --extra snappy --extra otel --extra schema --generate-hashes --allow-unsafe --strip-extras \
	    --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	    $(LOCK_FLAGS) --output-file requirements.lock pyproject.toml

clean: ## remove the environment, builds and caches
	@rm -rf $(VENV) .venv-newest build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Print one line that says what to install. It must also run on an old Python, hence no new syntax.
define check-python
command -v $(PYTHON) >/dev/null || \
    { echo "Penstock needs Python 3.11 or newer: install python3.11 and python3.11-venv, or set PYTHON=..." >&2; exit 1; }; \
$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; \
sys.version_info >= (3, 11) or sys.exit("Penstock needs Python 3.11 or newer and $(PYTHON) is " + v + ": install python3.11 and python3.11-venv, then make PYTHON=python3.11"); \
import importlib.util as u; \
all(map(u.find_spec, ("venv", "ensurepip"))) or sys.exit("Python " + v + " lacks its venv module: install python" + v + "-venv (its name on Debian and Ubuntu)")'
endef
