# Every command makes .venv and installs what it needs before it starts.
#   make demo   train a Flowformer language model with fairseq and a Flowformer image model with timm, and show both
#   make test   the whole test suite in parallel: one single-threaded process per core, one test file at a time
#   make quick  lint, then what one runs before each commit, in less than two minutes on two cores; tests/quick.py
#   make test-oldest   the whole suite with the oldest versions of tests/oldest.txt, in .venv-oldest
#   make quick-oldest  a part of it, in a few minutes; tests/quick.py
#   make lint   style, format and spelling of the whole tree, in seconds
#   make tables  write the tables in Markdown files that are generated, of mechanisms
#   make bench  speed and memory compared with softmax attention, the authors' code and other packages
#   make docs   the documentation site in build/docs: every Markdown page, and the public API; a broken link is an error
#   make package  the wheel and the source archive in work/package, checked and the wheel tried in a new environment
# PYTHON=... names the interpreter that makes .venv. Without it, the first of python3, python3.12, python3.11 and
# python3.10 that is Python 3.10, 3.11 or 3.12 is used.

VENV := .venv
READY := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
EXTRAS := fairseq,timm,test,demo

.PHONY: demo test quick test-oldest quick-oldest lint tables bench docs package

demo: $(READY)
	$(VENV)/bin/python -m recipes.demo

# Files in their order: xdist would begin with those of most tests, and end with the few tests that take a minute each.
test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=15 $(SELECTED)

quick: lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --quick -n logical --maxprocesses 8

# The tests of the checkout in another environment: make calls itself with the versions that pip may choose from.
test-oldest:
	PIP_CONSTRAINT=$(CURDIR)/tests/oldest.txt $(MAKE) VENV=.venv-oldest test

# The longest tests are in one file, which all processes take from.
quick-oldest:
	$(MAKE) test-oldest SELECTED='--quick-oldest --dist load'

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell

tables: $(READY)
	$(VENV)/bin/python -m common.mechanisms

bench: $(READY)-bench
	$(VENV)/bin/python -m recipes.bench

docs: $(READY)-docs
	$(VENV)/bin/python -m sphinx -E -W --keep-going -c .ci/docs . build/docs

package: $(READY)-package
	.ci/package $(VENV)/bin/python

# The packages of one more extra.
$(READY)-%: $(READY)
	$(VENV)/bin/python -m pip install --editable '.[$*]'
	@touch $@

# Everything is checked before anything is made. fairseq is built from source, which needs a C++ compiler.
$(READY): setup.cfg pyproject.toml
	@if [ -x $(VENV)/bin/python ]; then \
	  if ! $(VENV)/bin/python -c '$(SUPPORTED)'; then \
	    echo "$(VENV) holds $$($(VENV)/bin/python --version); needed: Python 3.10, 3.11 or 3.12." \
	      "Remove $(VENV) and run make again." >&2; exit 1; \
	  fi; \
	else \
	  for python in $(or $(PYTHON),python3 python3.12 python3.11 python3.10); do \
	    if $$python -c '$(SUPPORTED)' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "$(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1); needed: Python 3.10, 3.11" \
	      "or 3.12. Install one and name it: make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo)" >&2; exit 1; \
	  fi; \
	fi; \
	if ! command -v $${CXX:-c++} >/dev/null; then \
	  echo "no C++ compiler ($${CXX:-c++}) on PATH; fairseq is built from source and needs one." >&2; exit 1; \
	fi; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  echo "Making $(VENV) with $$($${found:-$(VENV)/bin/python} --version)"; \
	  $${found:-$(VENV)/bin/python} -m venv $(VENV) || exit 1; \
	fi; \
	echo "Installing into $(VENV); fairseq is built from source, which takes several minutes."
	$(VENV)/bin/python -m pip install --upgrade pip
	$(VENV)/bin/python -m pip install --editable '.[$(EXTRAS)]'
	@touch $@
