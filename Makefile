# `make bench` runs the main job from a fresh clone, `make test` passes the tests but the slow ones, which `make test-slow`
# passes; each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start many Pythons: each would compile the package again where the shell forbids Python to keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: bench test test-slow lint clean

# Compiling every module of torch and transformers takes longer than the rest; Python compiles those that are imported.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# On a GPU: the full-size Qwen3-VL-30B-A3B tower with random weights. On a CPU: a small one, and a replay saves nothing.
bench: $(STAMP)
	$(BIN)/vitgraph bench

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Whole programs, several ranks, oracles, drills and compiled towers, many of which wait: three at once on two cores. What
# fails beside others runs once more, alone.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow || $(BIN)/python -m pytest --last-failed -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
