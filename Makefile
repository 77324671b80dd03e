# Soliton. `make help` lists the targets. Each one first makes .venv and installs the pinned requirements, once.
.POSIX:

# Any of python3.11, python3.12, python3.13.
PYTHON ?= python3
# Options for installing torch alone, for example PIP_ARGS="--index-url <PyTorch's CPU index>" for the small CPU build.
PIP_ARGS ?=
# More options for pytest, for example PYTEST_ARGS="-x tests/pure".
PYTEST_ARGS ?=

BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check

help:
	@echo 'make demo       generate text with the bundled model'
	@echo 'make test       the tests, without the long grid and without a GPU'
	@echo 'make test-full  the tests with the long grid, without a GPU'
	@echo 'make lint       style, types and import rules'
	@echo 'make clean      remove .venv and caches'
	@echo
	@echo 'PYTHON=python3.12    which Python 3.11 to 3.13 makes .venv (now: $(PYTHON))'
	@echo 'PIP_ARGS="..."       options for installing torch, such as another --index-url'
	@echo 'PYTEST_ARGS="..."    more options for pytest'

demo: .venv/base.stamp
	$(BIN)/soliton generate pebble --demo

# Two processes of one torch thread each: the engine's steps are too small to share among threads.
test: .venv/dev.stamp
	SOLITON_TEST_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not full and not gpu' $(PYTEST_ARGS)

test-full: .venv/dev.stamp
	SOLITON_TEST_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not gpu' $(PYTEST_ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --output-format concise .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo 'Soliton needs Python 3.11, 3.12 or 3.13 as $(PYTHON); choose one: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/base.stamp: requirements/torch.txt requirements/base.txt requirements/build.txt requirements/constraints.txt pyproject.toml
	@test -x .venv/bin/python || $(MAKE) .venv/bin/python
	$(PIP) install $(PIP_ARGS) -r requirements/torch.txt
	$(PIP) install -r requirements/base.txt -r requirements/build.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

.venv/dev.stamp: .venv/base.stamp requirements/dev.txt
	$(PIP) install -r requirements/dev.txt
	touch $@

.PHONY: help demo test test-full lint clean
