PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(notdir $(PYTHON))
FRAMEWORKS := $(VENV)/.frameworks
# Python compiles what is imported; pip would compile four times as many files, for a minute.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
PROCESSES ?= 5
EXTRAS := workers,report,cluster,gcs,s3,azure,meter,test

# Tests start hundreds of processes; without bytecode each would compile precache anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test tests test-all lint style types format bench docs wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv, with everything that the targets below need (PYTHON=python3.13: for that Python)

demo: $(STAMP)  ## build a store from real photos, and train from it and from the photos
	@$(BIN)/python -m tests.demo

# Types are checked beside the tests: mypy keeps one core busy for half a minute.
test: $(STAMP)  ## check style and types, run the tests (PROCESSES=0: one at a time)
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory --jobs 2 types tests

# A file's tests stay in one process: they share servers, and a process keeps what its first Ray told it. Files in
# their order: sorted by their number of tests, those that wait for processes would all come last. One thread of OpenMP
# each: more than there are cores spend a sixth of all CPU time waiting for each other.
# The asserts of all tests are compiled first: else each process would compile them.
tests: $(STAMP)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# One at a time: they measure, or load the machine by themselves.
test-all: $(FRAMEWORKS) test  ## the same, and the tests that take minutes
	$(BIN)/python -m pytest -m heavy

lint: style types  ## check style and types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)  ## lay out the code, and mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure reading and building
	@$(BIN)/python -m tests.bench.reading
	@$(BIN)/python -m tests.bench.building

docs: $(STAMP)  ## make build/site, the documentation as a site
	@$(PIP_INSTALL) --editable '.[$(EXTRAS),docs]' --constraint constraints.txt
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	@echo "To read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

# Publish the wheels of cibuildwheel instead, for all interpreters and older systems: pyproject.toml has its settings.
wheel: $(STAMP)  ## make dist/: an sdist, and a manylinux wheel for CPython 3.11 and later, both checked
	@$(PIP_INSTALL) --editable '.[$(EXTRAS),release]' --constraint constraints.txt
	@rm -rf dist build
	@$(BIN)/python -m build --config-setting=--build-option=--py-limited-api=cp311 --outdir dist/linux .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/linux/*.whl
	@mv dist/linux/*.tar.gz dist && rm -r dist/linux
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/check-wheel-contents dist/*.whl

clean:  ## remove .venv, caches and build leftovers
	rm -rf $(VENV) build dist *.egg-info precache/codecs/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find precache workers tests -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp comes last, so that an install that was cut short is made again.
$(STAMP): pyproject.toml constraints.txt precache/codecs/_rows.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "precache needs Python 3.11 or later, and '$(PYTHON)' is not one." \
	       "Name another: make venv PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV) (minutes, the first time) ..."
# Debian ships venv without ensurepip: there the system's pip installs one into the new environment.
	@{ test "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V)" && \
	    $(BIN)/python -m pip --version >/dev/null 2>&1; } || \
	  $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@$(PIP_INSTALL) --editable '.[$(EXTRAS)]' --constraint constraints.txt
# Else, beside a clone that is called precache, Python would take its folder for a namespace package.
	@printf '%s\n' '$(CURDIR)' '$(CURDIR)/workers' > \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/precache_clone.pth"
	@touch $@

$(FRAMEWORKS): $(STAMP)
	@$(PIP_INSTALL) --editable '.[$(EXTRAS),frameworks,docs]' --constraint constraints.txt
	@touch $@
