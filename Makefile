# `make train` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/tiny_v41.py

.PHONY: train test test-all soak check format figures bench bench-peers compare hooks clean

train: .venv/installed
	$(BIN)/python train.py $(CONFIG) $(ARGS)

test: check
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: check
	$(BIN)/python -m pytest --hypothesis-profile thorough $(ARGS)

soak: .venv/installed
	KILLS=200 $(BIN)/python -m pytest tests/laws/test_kill.py --timeout=0 $(ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/ty check --python .venv

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes docs/configuration.md and measures the figures of all pages again. ARGS="--all" trains and times too, which takes
# hours; ARGS="--write" corrects the pages.
figures: .venv/installed
	$(BIN)/python benchmarks/configuration.py
	$(BIN)/python benchmarks/figures.py $(ARGS)

# Measures training on CPU and programs compiled for TPUs (the latter with the TPU compiler: pip install '.[tpu]'), and
# writes the tables of docs/performance.md. ARGS="steps" compiles whole training steps, an hour.
bench: .venv/installed
	$(BIN)/python benchmarks/run.py $(ARGS)

# Measures a small model against transformers, and writes the table of docs/performance.md.
bench-peers: .venv/installed
	test -d .cache/peers/transformers || $(PYTHON) -m venv .cache/peers/transformers
	.cache/peers/transformers/bin/python -m pip install --quiet 'transformers==5.24.*' 'torch==2.13.*' numpy
	$(BIN)/python benchmarks/peers.py $(ARGS)

# Git then runs `make check` before every commit; `git commit --no-verify` leaves it out.
hooks:
	printf '#!/bin/sh\nexec make check\n' > "$$(git rev-parse --git-path hooks)/pre-commit"
	chmod +x "$$(git rev-parse --git-path hooks)/pre-commit"

# Trains both tiny configurations for 20 steps here and at the git revision BASE: losses, CPU-seconds, compile seconds and
# temporary bytes. ARGS="configs/tiny_v4.py --steps 5" compares one of them.
compare: .venv/installed
	$(BIN)/python benchmarks/compare.py $(BASE) $(ARGS)

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .cache runs
