# Everything sets itself up: a virtual environment in .venv, and the demo model. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvbus-setup

QUICK_TESTS := $(BIN)/pytest -n logical --maxprocesses 4 -m "not e2e and not slow"
COMPOSE := $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: help cluster setup demo test test-fast check hooks coverage mutants docs matrix lint types format bench bench-micro soak clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make .venv with everything

$(STAMP): pyproject.toml .ci/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash .ci/setup.sh
	@touch $(STAMP)

demo: setup ## one prefill and one decode engine, a real model, three questions
	@$(BIN)/kvbus demo

cluster: ## a local cluster in containers, with Jaeger and Grafana; Ctrl-C ends it
	$(COMPOSE) -f docker/compose.yaml up --build

test: setup ## the whole test suite, real engines included
	$(BIN)/pytest

test-fast: setup ## the quick tests: no real engines, nothing that takes many seconds
	$(QUICK_TESTS)

check: lint types test-fast ## lint, types, layering, docs and the quick tests: before each push

hooks: setup ## git runs ruff before a commit, and `make check` before a push
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type pre-push

coverage: setup ## which lines the quick tests run; fails below the floor in pyproject.toml
	$(QUICK_TESTS) --cov --cov-report=term:skip-covered

mutants: setup ## change the state machines one line at a time; tests must notice each change (ONLY="kvbus.protocol.lease*")
	$(BIN)/mutmut run $(ONLY)
	$(BIN)/mutmut results

docs: setup ## write the tables of docs/protocol.md anew
	KVBUS_DOCS=write $(BIN)/pytest -q tests/core/test_protocol_tables.py

matrix: setup ## every model family and engine option against one engine (about 25 minutes)
	KVBUS_MATRIX=all $(BIN)/pytest -m matrix -s

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy --strict
	$(BIN)/mypy

format: setup ## ruff format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## TTFT against vLLM's own NIXL connectors, interleaved rounds
	$(BIN)/kvbus bench

bench-micro: setup ## what the parts cost: matcher, messages, choice, spans; saved, and compared with the last time
	$(BIN)/pytest -q -p pytest_benchmark.plugin -o python_files='bench_*.py' tests/benchmarks --benchmark-sort=name \
		--benchmark-columns=min,median,iqr,rounds --benchmark-autosave --benchmark-storage=.benchmarks $(if $(wildcard .benchmarks/*),--benchmark-compare)

soak: setup ## ten minutes of load on real engines, every answer checked
	$(BIN)/kvbus soak --minutes 10

clean: ## remove .venv
	rm -rf $(VENV)
