# `make demo` and `make test` set everything up on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test bench lint types imports docs clean

$(STAMP): pyproject.toml codecs/pyproject.toml backends/pyproject.toml constraints.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and alone, so that nothing after it asks for another build
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e codecs -e 'backends[s3]' -e '.[all]' -r requirements-dev.txt
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/cnr demo $(URL)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/codecs.py $(ARGS)
	$(BIN)/python benchmarks/reading.py $(ARGS)
	$(BIN)/python benchmarks/following.py $(ARGS)
	$(BIN)/python benchmarks/tracking.py $(ARGS)
	$(BIN)/python benchmarks/storage.py $(ARGS)
	$(BIN)/python benchmarks/saving.py $(ARGS)
	$(BIN)/python benchmarks/volumes.py $(ARGS)
	$(BIN)/python benchmarks/state_bits.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
