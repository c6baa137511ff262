# make demo, make test: all of the set-up and the job; run again, the set-up is skipped.
# Paths are relative to this folder, so that a checkout may lie anywhere: make -C path/to/stoker demo
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
PY := .venv/bin/python
STAMP := .venv/.ready
SCRIPTS_STAMP := .venv-scripts/.ready
DOCS_STAMP := .venv-docs/.ready
FRAMEWORKS := tests/scripts/constraints.txt
DOCS := docs/constraints.txt
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs
UNFINISHED := .venv/.unfinished
RELEASE_STAMP := .venv-release/.ready
PINS := $(shell cat constraints.txt pyproject.toml | sha256sum | cut -c1-16)
REPORT := examples/data/stoker-report
PYTHON ?=
ARGS ?=
unexport PYTHONDONTWRITEBYTECODE  # else each process of pytest compiles all tests anew

# The stamp holds the folder it was made for. A checkout that was moved, a Python that is gone, or another PYTHON than
# last time sets up again, as does a change of what is to be installed.
WHO := import sys; print(sys.base_prefix, sys.version_info)
ifneq ($(shell test "$$(cat $(STAMP) 2>/dev/null)" = "$$(pwd -P)" && have=$$($(PY) -c '$(WHO)' 2>/dev/null) && \
	if test -n "$(PYTHON)"; then test "$$("$(PYTHON)" -c '$(WHO)' 2>/dev/null)" = "$$have"; fi && echo ready),ready)
$(STAMP): always
endif

# Candidates are run, not only found: a shim may stand on PATH for a Python that is not there. 3.11 first, for which
# wheels are surest. What a set-up that was interrupted left is not built upon: a package may lie there by half.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	fits='import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))'; \
	if test -n "$(PYTHON)"; then \
		python="$(PYTHON)"; \
		"$$python" -c "$$fits" 2>/dev/null || { echo "PYTHON=$$python does not run as a Python 3.10 to 3.14 with venv" >&2; exit 1; }; \
		same() { test "$$("$$python" -c '$(WHO)')" = "$$($(PY) -c '$(WHO)')"; }; \
	else \
		same() { :; }; \
	fi; \
	if test -e $(UNFINISHED) || ! $(PY) -c "$$fits" 2>/dev/null || ! $(PY) -m pip --version >/dev/null 2>&1 || ! same || \
		! test "$$(cat .venv/.pins 2>/dev/null)" = "$(PINS)"; then \
		if test -z "$$python"; then \
			for p in python3.11 python3.12 python3.13 python3.10 python3.14 python3; do \
				if $$p -c "$$fits" >/dev/null 2>&1; then python=$$p; break; fi; \
			done; \
		fi; \
		test -n "$$python" || { echo "no Python 3.10 to 3.14 with venv runs here; make PYTHON=/path/to/python" >&2; exit 1; }; \
		echo "making .venv with $$python"; \
		.ci/environment .venv "$$python" "-c constraints.txt .[dev]"; \
		touch $(UNFINISHED); echo "$(PINS)" > .venv/.pins; \
	fi; \
	rm -f $@; touch $(UNFINISHED); \
	$(PY) -m pip install --disable-pip-version-check -q --no-deps -e .; \
	pwd -P > $(UNFINISHED); mv $(UNFINISHED) $@

# The frameworks whose scripts are tested have an environment of their own; the folder is part of the stamp here, too.
ifneq ($(shell cat $(SCRIPTS_STAMP) 2>/dev/null),$(shell pwd -P))
$(SCRIPTS_STAMP): always
endif

$(SCRIPTS_STAMP): $(STAMP) pyproject.toml $(FRAMEWORKS)
	@set -e; \
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "the frameworks of tests/scripts are pinned for Python 3.11 and later; make PYTHON=/path/to/python" >&2; exit 1; }; \
	.ci/environment .venv-scripts $(PY) "-c $(FRAMEWORKS) torch" "--no-deps -r $(FRAMEWORKS)"; \
	.venv-scripts/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .; \
	pwd -P > $@

$(RELEASE_STAMP): $(STAMP) release/constraints.txt
	@rm -rf .venv-release; $(PY) -m venv .venv-release
	@.venv-release/bin/python -m pip install --disable-pip-version-check -q --no-deps -r release/constraints.txt
	@touch $@

# The packages that make the site have an environment of their own, beside stoker and torch of .venv.
ifneq ($(shell cat $(DOCS_STAMP) 2>/dev/null),$(shell pwd -P))
$(DOCS_STAMP): always
endif

$(DOCS_STAMP): $(STAMP) pyproject.toml $(DOCS)
	@set -e; \
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "what makes the site is pinned for Python 3.11 and later; make PYTHON=/path/to/python" >&2; exit 1; }; \
	.ci/environment .venv-docs $(PY) "--no-deps -r $(DOCS)"; \
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$(.venv-docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"; \
	pwd -P > $@

.PHONY: always help setup demo test test-slow test-scripts test-cluster test-versions lint types bench bench-gpu docs docs-serve release clean
help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1 \2/p' Makefile | while read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done
	@echo "  PYTHON=/path/to/python chooses the interpreter (3.10 to 3.14)"

setup: $(STAMP) ## the virtual environment in .venv, everything pinned

demo: $(STAMP) ## an untouched training script on real photographs, five epochs: plain, sped up, compared
	@$(PY) examples/make_photos.py --out examples/data
	@printf '\n== stoker run examples/train_lazy.py\n'
	@.venv/bin/stoker run --json $(REPORT).json examples/train_lazy.py
	@printf '\n== stoker run --apply examples/train_lazy.py\n'
	@.venv/bin/stoker run --apply --json $(REPORT)-applied.json --html $(REPORT).html examples/train_lazy.py
	@printf 'as a page: $(REPORT).html\n'

test: $(STAMP) ## the fast tests, two minutes on two cores; ARGS="-k name" chooses some
	@$(PY) -m pytest $(ARGS)

test-slow: $(STAMP) ## those that take longest, a quarter of an hour
	@$(PY) -m pytest -m slow $(ARGS)

test-scripts: $(SCRIPTS_STAMP) ## scripts of Lightning, Hugging Face, MONAI, ... as people write them
	@.venv-scripts/bin/python -m pytest tests/scripts -m "scripts and not cluster" $(ARGS)

test-cluster: $(SCRIPTS_STAMP) ## nodes of a Ray cluster, all on this machine: in one process, for each would start its own
	@.venv-scripts/bin/python -m pytest tests/scripts -m cluster -n 0 $(ARGS)

test-versions: $(STAMP) ## contract and engine with other versions of torch and Python: hours, and gigabytes each
	@$(PY) -m benchmarks.versions run --drop

lint: $(STAMP) ## ruff: lint and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(STAMP) ## mypy --strict
	@$(PY) -m mypy --strict src

bench: $(STAMP) $(SCRIPTS_STAMP) ## stoker against torch, alternated in one run
	@$(PY) examples/make_photos.py --out examples/data
	@$(PY) -m benchmarks run
	@$(PY) -m benchmarks.observe
	@$(PY) -m benchmarks.staging run
	@$(PY) -m benchmarks.runs run
	@.venv-scripts/bin/python -m benchmarks.scripts run

bench-gpu: $(STAMP) ## the same with a device; says so where there is none
	@$(PY) -m benchmarks gpu

release: $(RELEASE_STAMP) ## source archive, wheel and bill of materials in dist/, checked; uploads nothing
	@rm -rf dist
	@.venv-release/bin/python -m build --outdir dist .
	@.venv-release/bin/python -m twine check --strict dist/*
	@$(PY) release/sbom.py > dist/stoker-$$($(PY) -c 'import stoker; print(stoker.__version__)').cdx.json
	@ls dist

docs: $(DOCS_STAMP) ## the documentation site in site/, without a network
	@$(MKDOCS) build --quiet
	@.venv-docs/bin/python -m docs.generate.check site

docs-serve: $(DOCS_STAMP) ## the same at http://127.0.0.1:8000, made anew when a page changes
	@$(MKDOCS) serve

clean: ## remove everything that make made
	rm -rf .venv .venv-scripts .venv-docs site .venv-versions .venv-release examples/data examples/*/data examples/.data.making-* benchmarks/data benchmarks/results/local
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
