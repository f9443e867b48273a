# make demo   run the whole workflow on the embedded target and print the result
# make test   run all tests
# make check  format and lint checks
# Each sets up .venv from the pinned lock first.
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
SHELL := bash

.PHONY: demo test check format clean

demo: $(VENV)/ready
	snakemake --cores all --resources gpu=4
	@python -m dflash.report --show results/summary.json

test: $(VENV)/ready $(VENV)/official/ready
	python -m pytest

check: $(VENV)/ready
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules
	snakemake --lint

format: $(VENV)/ready
	ruff check --fix .
	ruff format .
	snakefmt Snakefile rules
	python -m dflash.config --write config

# The official package, a peer in tests: a folder of its own, since its import name is ours too.
$(VENV)/official/ready: envs/official.txt | $(VENV)/ready
	rm -rf $(VENV)/official
	python -m pip install -q --no-deps --target $(VENV)/official -r envs/official.txt
	touch $@

$(VENV)/ready: envs/lock.txt envs/nodeps.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -r envs/lock.txt
	$(VENV)/bin/pip install -q --no-deps -r envs/nodeps.txt
	$(VENV)/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf results .snakemake
