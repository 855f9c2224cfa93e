# `make quickstart` and `make test` need nothing but Python >= 3.11 with venv and pip. PYTHON=python3.12 picks another.
# NPROC=2 runs the quickstart on two ranks.
PYTHON ?= python3
NPROC ?= 1
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := torch==2.13.0
LOW_BIT := tests/optim/test_low_bit.py tests/parallel/random_layouts/test_low_bit_layouts.py
VAE := tests/models/decoders/test_vae.py
DEVICE_THREAD := tests/test_device_thread.py tests/parallel/step/test_device_thread.py tests/ops tests/optim/test_offload.py \
	$(addprefix tests/parallel/,expert memory schedule sections sequence tensor test_garbage.py test_state.py) tests/train/test_hooks.py

# The machine's own Python where it has torch, which may be built for its GPU; else that of $(VENV).
RUN_WHERE_TORCH_IS = python=$$($(PYTHON) -c 'import torch' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python); $$python

.PHONY: install quickstart test test-second test-slow test-low-bit test-vae test-device-thread test-families test-layouts test-versions test-gpu coverage lint package site families bench any-to-any gpu

# A Python that was asked for is not used where $(VENV) exists with another one.
install: $(INSTALLED)
ifneq ($(origin PYTHON),file)
	@found=$$($(BIN)/python --version 2>&1); asked=$$($(PYTHON) --version 2>&1); \
		test "$$found" = "$$asked" || echo "$(VENV) has $$found and stays so; for PYTHON=$(PYTHON) ($$asked), first remove it: rm -r $(VENV)" >&2
endif

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "omnitrain needs Python >= 3.11; found '$(PYTHON)': $$($(PYTHON) --version 2>&1 | head -n 1). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "'$(PYTHON)' has no venv or pip; install them (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(TORCH)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	@touch $@

quickstart: install
	@$(BIN)/omnitrain run recipes/quickstart.yaml --nproc $(NPROC)
	@$(BIN)/python tasks/quickstart/picture.py runs/quickstart runs/quickstart/picture.png

# One thread: figures that repeat, and tests that do not fight over cores.
test test-second test-slow test-low-bit test-vae test-device-thread test-families test-layouts test-versions coverage families bench any-to-any: export OMP_NUM_THREADS := 1

test: install
	@$(BIN)/python -m tests.side_by_side

# Further cases and longer runs of what `make test` shows; CI runs them, and so does `make test-slow`.
test-second: install
	@$(BIN)/python -m tests.side_by_side -m second

test-slow: test-low-bit test-vae
	@$(BIN)/python -m pytest -q -m slow $(addprefix --ignore=,$(LOW_BIT) $(VAE))

# torchao has a folder of its own: where it is installed, transformers imports it, and it writes messages on every rank.
test-low-bit: install
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade -c constraints.txt --target $(VENV)/torchao torchao
	@PYTHONPATH=$(VENV)/torchao $(BIN)/python -m pytest -q -m slow $(LOW_BIT)

# diffusers, in a folder of its own, with what it imports.
test-vae: install
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(VENV)/diffusers diffusers importlib_metadata zipp regex requests charset_normalizer idna urllib3 certifi
	@PYTHONPATH=$(VENV)/diffusers $(BIN)/python -m pytest -q -m slow $(VAE)

# Backwards in autograd's worker thread, as on a GPU: tests/device_thread.py says how.
test-device-thread: install
	@$(BIN)/python -m pytest -q --device-thread -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true $(DEVICE_THREAD)

# All families of transformers, in one process and on two ranks, in fp32 and in bf16; prints which that nothing here names
# are exact, and why not.
test-families: install
	@$(BIN)/python -m pytest -q -m slow tests/models/test_unnamed_families.py tests/models/test_low_precision.py

# 150 random layouts against plain transformers; a failed row is run alone by python -m tests.parallel.random_layouts "ROW".
# And every pair of values of a section.
test-layouts: install
	@$(BIN)/python -m pytest -q -m slow tests/parallel/random_layouts/test_random_layouts.py tests/parallel/sections/test_layouts.py

# A short suite with the lowest and the highest torch and transformers (omnitrain.packages.WINDOW), each in .versions: 6 GB
# to install, so CI does not run it. Who changes pyproject.toml, constraints.txt, torch_private.py or
# transformers_private.py does, and says in the commit or in the issue's note what passed, when, and at which commit.
test-versions: install
	@$(BIN)/python -m tests.versions

# On GPUs, by the machine's own Python where it has torch (and pytest).
test-gpu:
	@export PYTHONPATH="$(CURDIR)/gpu_wheels/unpacked:$$PYTHONPATH"; $(RUN_WHERE_TORCH_IS) -m pytest -q -m gpu $(ARGS)

# The tests of `make test`; ranks and processes of their own count. Fails below setup.cfg's share of lines and branches.
coverage: install
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m tests.side_by_side $(ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

# The source distribution and the wheel, in dist/, as they would be uploaded.
package: install
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade --target $(VENV)/release build twine
	@rm -rf dist
	@PYTHONPATH=$(VENV)/release $(BIN)/python -m build -q --outdir dist
	@PYTHONPATH=$(VENV)/release $(BIN)/python -m twine check --strict dist/*

# The site, in site/: docs/ and what docs/site.py makes from the code. A link that leads nowhere is an error.
site: install
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade --target $(VENV)/site $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@PYTHONPATH=$(VENV)/site NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

# What works with which family of transformers, in docs/coverage.json and docs/coverage.md: hours; it goes on where it ended.
families: install
	@$(BIN)/python -m tests.models.coverage $(ARGS)

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: install
	@mkdir -p benchmarks/results
	@set -e; for script in $(filter-out $(addprefix benchmarks/,harness.py omni_step.py repo_samples.py slow_link.py simulated_ranks.py process_groups.py two_commits.py gpu_day.py any_to_any.py),$(wildcard benchmarks/*.py)); do \
		$(BIN)/python $$script --json benchmarks/results/$$(basename $$script .py).json; \
	done

# Images and films of digits by each decoder, three seeds of each; runs/any_to_any keeps what is done.
any-to-any: install
	@$(BIN)/python benchmarks/any_to_any.py --json benchmarks/results/any_to_any.json

# One visit to a machine with a GPU (docs/gpu.md): ARGS="--only right,dense", ARGS=--tiny.
gpu:
	@$(RUN_WHERE_TORCH_IS) benchmarks/gpu_day.py $(ARGS)
