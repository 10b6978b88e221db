# `make demo` and `make test` set everything up on a fresh machine with Python 3.11 or newer.
PYTHON      ?= python3
CONSTRAINTS ?= constraints.txt
GROUP       ?= dev
# Another index for torch alone, such as https://download.pytorch.org/whl/cpu: on Linux the usual one has only builds with CUDA.
TORCH_INDEX ?=
VENV        := .venv
BIN         := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP       := $(VENV)/.installed

# For two cores: tests that stop, kill and lose things wait a quarter of their time.
WORKERS     ?= 3
PYTEST      := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SCHEMA      := $(BIN)/check-jsonschema --quiet --builtin-schema vendor

.PHONY: demo quick test nightly bench bench-long bench-smoke lint schemas types imports docs pictures version clean

$(STAMP): pyproject.toml codecs/pyproject.toml backends/pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and alone, so that nothing after it asks for another build
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) -e codecs -e 'backends[s3]' -e '.[all]' --group $(GROUP)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps --group torchrec
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/cnr demo $(URL)

# A -m of your own in ARGS takes the place of these.
quick: $(STAMP)
	$(PYTEST) -m "not slow and not server and not data and not nightly" $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not nightly" $(ARGS)

# Everything, ten times the histories, and other examples each time: where CI is set, hypothesis draws the same ones otherwise.
nightly: $(STAMP)
	CNR_NIGHTLY_FACTOR=10 $(PYTEST) -m "nightly or not nightly" --hypothesis-profile=default --timeout=3600 $(ARGS)

# Every benchmark with aims, in short forms that take less than 20 minutes.
bench: $(STAMP)
	$(BIN)/python benchmarks/codecs.py $(ARGS)
	$(BIN)/python benchmarks/lattice.py $(ARGS)
	$(BIN)/python benchmarks/relative.py $(ARGS)
	$(BIN)/python benchmarks/reading.py $(ARGS)
	$(BIN)/python benchmarks/following.py $(ARGS)
	$(BIN)/python benchmarks/tracking.py $(ARGS)
	$(BIN)/python benchmarks/storage.py $(ARGS)
	$(BIN)/python benchmarks/saving.py $(ARGS)
	$(BIN)/python benchmarks/cold.py $(ARGS)
	$(BIN)/python benchmarks/growth.py $(ARGS)
	$(BIN)/python benchmarks/summary.py

# The long forms, and what counts bytes and losses of whole trainings: hours.
bench-long: $(STAMP)
	$(BIN)/python benchmarks/tracking.py --full $(ARGS)
	$(BIN)/python benchmarks/saving.py --full $(ARGS)
	$(BIN)/python benchmarks/cold.py --full $(ARGS)
	$(BIN)/python benchmarks/growth.py --full $(ARGS)
	$(BIN)/python benchmarks/commands.py $(ARGS)
	$(BIN)/python benchmarks/volumes.py $(ARGS)
	$(BIN)/python benchmarks/state_bits.py $(ARGS)
	$(BIN)/python benchmarks/relative.py --full $(ARGS)
	$(BIN)/python benchmarks/summary.py

# A minute: fails where a ratio to a peer is below half of the one on record.
bench-smoke: $(STAMP)
	$(BIN)/python benchmarks/smoke.py $(ARGS)

lint: $(STAMP) schemas
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The schemas come with the tool: no network.
schemas: $(STAMP)
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).citation-file-format CITATION.cff

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# Those that README and docs show; the second asks for Chromium.
pictures: $(STAMP)
	$(BIN)/python -m tools.pictures
	$(BIN)/python -m tools.screenshots

# make version prints the version of the three distributions, make version V=0.2.0 sets it.
version:
	$(PYTHON) tools/version.py $(V)

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
