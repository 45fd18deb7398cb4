# Two commands for a fresh machine: `make train` and `make test`. Both create the environment the first time.
# Arguments pass through: make train ARGS="strategy=zero3 launch.devices=4"

VENV ?= .venv
PYTHON ?= python3
ARGS ?=
READY := $(VENV)/.ready

.PHONY: train test lint clean help

help: ## Show this text
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

train: $(READY) ## Train the example GPT; ARGS are Hydra overrides
	$(VENV)/bin/python examples/train.py $(ARGS)

# Tests that share warm ranks stay on one worker; the other starts scripts and runs what needs no rank.
test: $(READY) ## Run the tests; ARGS are pytest's
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

lint: $(READY) ## Lint, format check, types, spelling
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell lightning_par examples conf tests benchmarks README.md CHANGELOG.md

clean: ## Remove the environment
	rm -rf $(VENV)

# torch first and by exact version: a range would let pip take a much larger build on some machines.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(READY)
