# Every target does its own set-up: virtual environment, package, servers. `make` lists them.

PYTHON ?= python3
# More arguments for pytest: make test ARGS="-k outcome -x"
ARGS ?=
# Most tests wait for something most of the time, so several files run at once, each with servers of its own.
IN_PARALLEL := -n 3 --dist loadfile

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
# The targets share one environment and one pair of servers; -j would gain nothing here.
.NOTPARALLEL:

IN_VENV := .venv/bin/python
# A terminal's colours are no use in a log, and pip's advice to root none to whoever runs make.
export PIP_ROOT_USER_ACTION := ignore
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: .env-run ## run the main job: monthly flight reports on a real RabbitMQ, with a table of outcomes
	@if [ -z "$${SAFEOPS_AMQP_URL:-}" ]; then $(install_servers); fi
	echo "demo: twelve reports, and what goes wrong beside them"
	$(IN_VENV) compose/app/demo.py

.PHONY: test
test: .env-dev .servers ## all tests in their short form, on private servers (up to 12 minutes on two cores)
	@echo "test: unit, typing, contract, integration and acceptance tests, without those marked long"
	$(IN_VENV) -m pytest -m "not long" $(IN_PARALLEL) $(ARGS)

.PHONY: test-long
test-long: .env-dev .servers ## the tests that take minutes: long fault runs, big bursts (up to 35 minutes)
	@if ! grep -rqE --include='*.py' 'mark\.long\b' tests; then
	    echo "test-long: no test is marked long yet, nothing to run"
	    exit 0
	fi
	echo "test-long: the tests marked long"
	$(IN_VENV) -m pytest -m long $(ARGS)

# Not part of `make test`: it takes the machine's RabbitMQ. This one fetches another for itself.
.PHONY: test-rabbitmq
test-rabbitmq: .env-dev ## the tests that need RabbitMQ, on another version of it: make test-rabbitmq RABBITMQ=4.0 (or 4.3)
	@if [ -z "$(RABBITMQ)" ]; then echo "test-rabbitmq: which one? make test-rabbitmq RABBITMQ=4.0 (or 4.3)" >&2; exit 1; fi
	export SAFEOPS_RABBITMQ="$(RABBITMQ)"
	$(install_servers)
	echo "test-rabbitmq: integration and acceptance tests on RabbitMQ $(RABBITMQ), without those marked long"
	$(IN_VENV) -m pytest -m "not long" $(IN_PARALLEL) tests/integration tests/acceptance $(ARGS)

.PHONY: bench
bench: .env-dev .servers ## speed against stock Dramatiq, both in one run
	@echo "bench: dramatiq-safeops against stock Dramatiq"
	$(IN_VENV) benchmarks/bench.py

.PHONY: check
check: .env-dev ## ruff, formatting, mypy, direction of imports
	@echo "check: ruff"
	$(IN_VENV) -m ruff check .
	echo "check: formatting"
	$(IN_VENV) -m ruff format --check .
	echo "check: mypy"
	$(IN_VENV) -m mypy
	echo "check: direction of imports"
	.venv/bin/lint-imports

.PHONY: down
down: ## stop every server and worker started from here, remove their files
	@if [ ! -x $(IN_VENV) ] || ! $(IN_VENV) -c 'import dramatiq_safeops' 2> /dev/null; then
	    echo "down: nothing is installed here, so nothing was started from here"
	    exit 0
	fi
	echo "down: stopping the servers and removing their files"
	$(IN_VENV) -m dramatiq_safeops.testing down

.PHONY: clean
clean: down ## down, then remove the virtual environment and all caches
	@echo "clean: removing .venv and the caches"
	rm -rf .venv .venv.lock .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	rm -rf compose/app/out
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# --- what the targets above need ------------------------------------------------------------------

install_servers = echo "servers: looking for the programs of RabbitMQ and PostgreSQL"; \
    $(IN_VENV) -m dramatiq_safeops.testing install

# Also where SAFEOPS_AMQP_URL names a server: the tests kill theirs.
.PHONY: .servers
.servers:
	@$(install_servers)

# The package with all its extras, and the demo's data.
.PHONY: .env-run
.env-run:
	@$(call in_locked_venv,$(install_package))

# The same and the tools, so that one environment serves all targets.
.PHONY: .env-dev
.env-dev:
	@$(call in_locked_venv,$(install_package) $(install_tools))

install_package = $(call install,package,--editable $(quote).[all$(comma)demo]$(quote))
# As an extra of the package that is there by now: installing the package itself a second time would take it
# away for a moment from a demo that runs beside this.
install_tools = $(call install,tools,$(quote)dramatiq-safeops[dev]$(quote))

# $(call install,WHAT,PIP ARGUMENTS): once per content of pyproject.toml, of which a copy is kept as the stamp.
# The copy is made before pip starts, under another name: where that name is found, an install was cut off.
define install
if ! cmp -s pyproject.toml .venv/installed-$(1); then
    echo "environment: installing the $(1) and what needs to go with it (a minute or two)"
    cp pyproject.toml .venv/installing
    .venv/bin/pip install --quiet $(2)
    mv .venv/installing .venv/installed-$(1)
fi

endef
comma := ,
quote := '

# $(call in_locked_venv,COMMANDS): one make at a time, in an environment that is whole, of this folder (a copied
# tree has a .venv that points into the tree it was copied from) and of this Python.
define in_locked_venv
if ! command -v $(PYTHON) > /dev/null; then
    echo "There is no '$(PYTHON)' on this machine. Install Python 3.10 or newer, or name one: make PYTHON=python3.12" >&2
    exit 1
fi
if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$$($(PYTHON) --version) is too old, Python 3.10 or newer is needed. Name one: make PYTHON=python3.12" >&2
    exit 1
fi
for made_here in . .venv .venv.lock; do
    if [ -e $$made_here ] && [ ! -w $$made_here ]; then
        echo "No permission to write to $(CURDIR)/$$made_here, which make needs. Use a copy of your own." >&2
        exit 1
    fi
done
exec 9> .venv.lock
if command -v flock > /dev/null && ! flock --nonblock 9; then
    echo "environment: another make is installing, waiting for it"
    flock 9
fi
made_for="$(CURDIR) $$($(PYTHON) -c 'import sys; print(sys.version_info[:2])')"
if [ -e .venv/installing ] || [ "$$(cat .venv/made-for 2> /dev/null)" != "$$made_for" ] || ! $(IN_VENV) -c ''; then
    if ! $(PYTHON) -c 'import venv, ensurepip' 2> /dev/null; then
        package="python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
        as_root=
        if [ "$$(id -u)" != 0 ]; then as_root="sudo -n"; fi
        if command -v apt-get > /dev/null && $$as_root true 2> /dev/null; then
            echo "environment: Python's venv module is missing, installing the Debian package $$package"
            $$as_root apt-get update -qq
            $$as_root env DEBIAN_FRONTEND=noninteractive \
                apt-get -o DPkg::Lock::Timeout=300 install --yes -qq --no-install-recommends "$$package"
        else
            echo "Python's venv module is missing. On Debian and Ubuntu install it with: sudo apt-get install $$package" >&2
            exit 1
        fi
    fi
    echo "environment: making .venv with $$($(PYTHON) --version)"
    rm -rf .venv
    $(PYTHON) -m venv .venv
    echo "$$made_for" > .venv/made-for
fi
$(1)
endef
