# Two commands do everything on a fresh machine: `make demo` and `make test`. They need Python 3.11 or later and make.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PROMPT ?= Why is the sky blue? Answer in two sentences.
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
export PROMPT

.PHONY: demo test lint format types bench clean

# Starts the daemon on the CPU, streams the answer to PROMPT, shows the pool, stops the daemon.
demo: $(INSTALLED)
	@PATH="$(BIN):$$PATH" sh docs/demo.sh

# Two files of tests at a time: most wait for compilers and processes, and more would keep daemons from their time-outs.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not follow an editable install with a package-dir, so it gets the folders under their real names.
types: $(INSTALLED)
	@mkdir -p build/types/deepinfer
	@for folder in daemon stages kernels clients; do ln -sfn ../../../$$folder build/types/deepinfer/$$folder; done
	cd build/types && $(BIN)/mypy --config-file ../../pyproject.toml -p deepinfer

bench: $(INSTALLED)
	$(BIN)/deepinfer-daemon bench serving

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; choose one with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
