# make demo, make test: all of the set-up and the job; run again, the set-up is skipped.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
VENV := $(ROOT)/.venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready
DATA := $(ROOT)/examples/data
REPORT := $(DATA)/stoker-report.json

# Run, not only found: a shim may stand on PATH for a Python that is not there. 3.11 first, for which wheels are surest.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)

$(STAMP): $(ROOT)/pyproject.toml $(ROOT)/constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.13 found; make PYTHON=/path/to/python" >&2; exit 1; }
	@rm -f "$@"
	@"$(PY)" -c 'import sys' 2>/dev/null || { rm -rf "$(VENV)"; echo "making .venv with $(PYTHON)"; "$(PYTHON)" -m venv "$(VENV)"; }
	@echo "installing (a minute or two)"
	@"$(PY)" -m pip install --quiet --disable-pip-version-check -c "$(ROOT)/constraints.txt" -e "$(ROOT)[dev]"
	@touch "$@"

.PHONY: help setup demo test slow lint types bench bench-gpu clean
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' "$(ROOT)/Makefile" | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(STAMP) ## virtual environment with everything pinned

demo: $(STAMP) ## an untouched training script on real photographs: observed, sped up, compared
	@cd "$(ROOT)" && "$(PY)" examples/make_photos.py --out "$(DATA)"
	@cd "$(ROOT)" && echo "\n== stoker run examples/train_lazy.py" && \
		"$(VENV)/bin/stoker" run --json "$(REPORT)" examples/train_lazy.py
	@cd "$(ROOT)" && echo "\n== stoker run --apply examples/train_lazy.py" && \
		"$(VENV)/bin/stoker" run --apply --json "$(REPORT)" examples/train_lazy.py

test: $(STAMP) ## every test but the slow ones
	@cd "$(ROOT)" && "$(PY)" -m pytest

slow: $(STAMP) ## the slow tests
	@cd "$(ROOT)" && "$(PY)" -m pytest -m slow

lint: $(STAMP) ## ruff: lint and format
	@cd "$(ROOT)" && "$(VENV)/bin/ruff" check . && "$(VENV)/bin/ruff" format --check .

types: $(STAMP) ## mypy --strict
	@cd "$(ROOT)" && "$(VENV)/bin/mypy" --strict src

bench: $(STAMP) ## stoker against torch, alternated in one run
	@cd "$(ROOT)" && "$(PY)" -m benchmarks run

bench-gpu: $(STAMP) ## the same with a device; says so where there is none
	@cd "$(ROOT)" && "$(PY)" -m benchmarks gpu

clean: ## remove everything that make made
	@cd "$(ROOT)" && rm -rf .venv examples/data benchmarks/data benchmarks/results/local .pytest_cache .mypy_cache .ruff_cache build dist src/*.egg-info
