# Everything a developer types. `make help` lists it.
# Settings: PYTHON (the Python that .venv is made with), ARGS (passed on to the tool), JOBS (test processes: two for each
# core, as most of them wait for other processes).
# VERSIONS (the Pythons of test-matrix), ONLY (its parts: tests/matrix.py lists them), PUBLISH (1: its table goes into
# docs/compatibility.md).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?=
JOBS ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1))))
VERSIONS ?=
ONLY ?=
PUBLISH ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Whoever has run out of tests takes some of the others': a few take as long as hundreds.
PYTEST = $(PY) -m pytest -n $(JOBS) --dist worksteal
# $(call killed_after,SECONDS): a test that hangs where its own time limit can't interrupt it is named, with all stacks,
# and its process ends; the others go on.
killed_after = -o faulthandler_timeout=$(1) -o faulthandler_exit_on_timeout=true
CODE := $(wildcard lowq lowq_pytest web tests examples benchmarks)
TYPED := $(wildcard lowq lowq_pytest web tests)

# Stamps: made when what they name is installed, out of date when pyproject.toml changes.
EMBEDDED := $(VENV)/.installed-embedded
DEV := $(VENV)/.installed-dev

# The tests start hundreds of Pythons, which without compiled files would each compile all that they import.
unexport PYTHONDONTWRITEBYTECODE

# $(call debian,WHAT IS MISSING,PACKAGES): install Debian packages as root, or say what to install.
debian = \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "$(1) missing: installing $(2)"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends $(2) >/dev/null; \
	else \
		echo "$(1) missing. On Debian or Ubuntu: sudo apt-get install $(2)" >&2; exit 1; \
	fi

# The tests start a PostgreSQL of their own: installing Debian's must start none.
no_default_cluster = \
	if [ "$$(id -u)" = 0 ]; then \
		mkdir -p /etc/postgresql-common && echo "create_main_cluster = false" >>/etc/postgresql-common/createcluster.conf; \
	fi

# $(call quoted,TEXT): TEXT as one word of the shell.
quoted = '$(subst ','\'',$(1))'

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(EMBEDDED) ## a node, its store, a producer and the dashboard in one process: no Redis needed (Ctrl-C ends it)
	@exec $(PY) examples/demo.py --web $(ARGS)

.PHONY: test
test: lint browser ## lint, then all tests but the slow ones (ARGS="-k push" for some of them)
	@$(PYTEST) $(call killed_after,900) -m "not slow" $(ARGS)

.PHONY: test-fast
test-fast: lint ## lint, and the rules that need no Redis
	@$(PYTEST) -m "not slow and not redis" tests/rules $(ARGS)

.PHONY: test-slow
test-slow: $(DEV) tools browser ## the tests that take long: many stories, the wide matrices, long chaos
	@$(PYTEST) $(call killed_after,2400) -m slow $(ARGS)

.PHONY: test-adverse
test-adverse: $(DEV) tools browser ## the tests of `make test` with pauses everywhere, as on a machine that is too busy (SEED=2)
	@PYTHONPATH=$(CURDIR)/tests/adverse ADVERSE_SEED=$(or $(SEED),1) $(PYTEST) $(call killed_after,900) -m "not slow" $(ARGS)

.PHONY: test-matrix
test-matrix: tools | $(PY) ## the tests on all Pythons, servers, kinds of connection: hours (ONLY="servers tls", VERSIONS="3.12", PUBLISH=1)
	@$(PY) -m tests.matrix --jobs $(JOBS) --only="$(ONLY)" --versions="$(VERSIONS)" $(if $(PUBLISH),--publish) --args=$(call quoted,$(ARGS))

.PHONY: mutants
mutants: $(DEV) tools ## how much the tests notice: 400 small changes of the code, drawn by a seed: an hour (ARGS="--seed 2 --count 50")
	@$(PY) -m tests.mutation --jobs $(JOBS) $(ARGS)

.PHONY: lint
lint: $(DEV) tools ## ruff, mypy, the import contracts, luacheck
	@$(PY) -m ruff check --output-format concise $(CODE)
	@$(PY) -m ruff format --check $(CODE)
	@$(PY) -m mypy $(TYPED)
	@out=$$($(VENV)/bin/lint-imports 2>&1) || { echo "$$out"; exit 1; }; tail -n 1 <<<"$$out"
	@if command -v luacheck >/dev/null; then $(PY) -m tests.luacheck; fi

.PHONY: format
format: $(DEV) ## let ruff put the code in shape
	@$(PY) -m ruff check --fix $(CODE)
	@$(PY) -m ruff format $(CODE)

.PHONY: chaos
chaos: $(DEV) tools ## kill, stop, cut off: the fault matrix, into docs/proof.md (ARGS="--only kill")
	@$(PY) -m tests.chaos --out docs/proof.md $(ARGS)

.PHONY: simulate
simulate: $(DEV) tools ## whole systems in one thread, each from one seed, with faults (ARGS="--seeds 10000", "--seed 7 --shrink")
	@$(PY) -m tests.simulation $(ARGS)

.PHONY: bench
bench: $(DEV) tools bench-peers ## lowq beside its peers, and its own figures: 20 minutes (ARGS=--publish: for the docs)
	@$(PY) -m benchmarks $(ARGS)

.PHONY: bench-quick
bench-quick: $(DEV) tools ## lowq's own figures, without peers: two minutes
	@$(PY) -m benchmarks --quick $(ARGS)

.PHONY: bench-peers
bench-peers: $(DEV) ## install the queue systems that lowq is compared with
	@$(PY) -m benchmarks.peers.install

.PHONY: docs
docs: $(DEV) ## the documentation as a site, into build/site; a link that leads nowhere fails it (ARGS="--version 0.1.0")
	@$(PY) -m tests.docs_site $(ARGS)

.PHONY: bench-docs
bench-docs: $(DEV) ## the tables and plots of the docs, from benchmarks/results.json
	@$(PY) -m benchmarks.publish $(ARGS)

.PHONY: screenshots
screenshots: $(DEV) tools browser ## the pictures of the documentation, into docs/screenshots
	@$(PY) -m benchmarks.screenshots $(ARGS)

.PHONY: web-cost
web-cost: $(DEV) tools ## what the dashboard costs on a million jobs in 1,000 shards
	@$(PY) -m benchmarks.web_cost

.PHONY: api-check
api-check: $(DEV) tools ## many more requests against the API's description than `make test` sends
	@SCHEMATHESIS_EXAMPLES=200 $(PY) -m pytest tests/rules/web/test_api.py -k description --timeout 1800 $(ARGS)

.PHONY: release-check
release-check: $(DEV) tools ## everything about a release but its publication: packages, dependencies, SBOM, workflows (ARGS="--tag v0.1.0")
	@$(PIP) install --group release
	@$(PY) -m tests.release $(ARGS)

.PHONY: shape
shape: $(DEV) tools ## how many functions and files a push and a job run through, and how large lowq is, beside their bounds
	@$(PY) -m benchmarks.shape $(ARGS)

.PHONY: clean
clean: ## remove what was built or cached, .venv too
	@rm -rf $(VENV) .matrix benchmarks/.peers build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The tools that are not Python's: the tests start redis-server themselves, openssl makes its certificate, lint runs luacheck.
.PHONY: tools
tools:
	@command -v redis-server >/dev/null || { $(call debian,redis-server is,redis-server); }
	@command -v luacheck >/dev/null || ( $(call debian,luacheck is,lua-check) ) \
		|| echo "going on without: the Lua scripts will not be checked" >&2
	@command -v openssl >/dev/null || ( $(call debian,openssl is,openssl) ) \
		|| echo "going on without: the tests of TLS will be skipped" >&2
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null \
		|| ( $(call no_default_cluster); $(call debian,PostgreSQL is,postgresql) ) \
		|| echo "going on without: the tests of the outbox in PostgreSQL will be skipped" >&2

# Only the browser tests need it: without it they are skipped, all others run.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| ( $(call debian,chromium is,chromium) ) \
		|| echo "going on without: the browser tests will be skipped" >&2

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "lowq needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { $(call debian,the venv module is,python3-venv); }
	@$(PYTHON) -m venv --clear $(VENV)

$(EMBEDDED): pyproject.toml | $(PY)
	@if [ ! $(DEV) -nt pyproject.toml ]; then \
		echo "installing lowq with its embedded store and its dashboard into $(VENV)"; \
		$(PIP) install -e '.[embedded,web]'; \
	fi
	@touch $@

$(DEV): pyproject.toml | $(PY)
	@echo "installing lowq and its development tools into $(VENV)"
	@$(PIP) install --upgrade 'pip>=25.1' # the first that knows groups
	@$(PIP) install -e '.[all]' --group dev
	@touch $@
