# `make start` and `make test` need Python 3.11 or newer, git and make; they bring the rest.
#
# On Linux MLX has two backends that cannot share an environment: BACKEND is cuda where an NVIDIA
# GPU answers, else cpu. `make start` uses .venv/cuda for cuda; tests always run on the CPU, in
# .venv. On macOS MLX brings Metal, and BACKEND is empty.

BACKEND := $(shell [ "$$(uname -s)" != Linux ] || { nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu; })
PYTHONS := python3.13 python3.12 python3.11 python3
ARGS :=
comma := ,

VENV := .venv
RUN_VENV := $(VENV)$(if $(filter cuda,$(BACKEND)),/cuda)
RUN_EXTRAS := $(if $(BACKEND),[$(BACKEND)])
DEV_EXTRAS := [$(if $(BACKEND),cpu$(comma))dev,clients]
PINS := pyproject.toml bench/pyproject.toml constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Where this is set, each process of the tests compiles all of them anew: 10 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: start test test-all test-slow test-cluster test-models test-kernels test-page test-gpu faults check bench bench-families clean

# A node in the foreground: make start ARGS="--name desk"
start: $(RUN_VENV)/.run
	@$(RUN_VENV)/bin/exo-node start $(ARGS)

PYTEST = $(VENV)/bin/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# The core of the tests: the quick ones and a smoke test of each slow kind, within five minutes
# Some tests, slow ones too: .venv/bin/pytest tests/placement/test_plan.py -k fastest
# Property tests have the same examples each time; ARGS=--hypothesis-profile=search tries others.
test: $(VENV)/.dev
	@$(PYTEST) -m core $(ARGS)

# All tests: the core, then the parts below
test-all: test test-slow

test-slow: $(VENV)/.dev
	@$(PYTEST) -m "not core" $(ARGS)

# The parts beside the core: nodes and runners as processes; model classes and long runs; CUDA
# kernels in an emulator; the page in a browser
test-cluster test-models test-kernels test-page: test-%: $(VENV)/.dev
	@$(PYTEST) -m $* $(ARGS)

# Seeds small bugs and reports which test notices each: make faults ARGS="--effort in-process"
faults: $(VENV)/.dev
	@$(VENV)/bin/python tests/faults/run.py $(ARGS)

# The CUDA kernels on the GPU; elsewhere in an emulator on the CPU
test-gpu: $(RUN_VENV)/.dev-gpu
	@$(RUN_VENV)/bin/pytest tests/shard/kernels/test_*_texts.py $(ARGS)

# Style, types, and that the generated code fits proto/peer.proto
check: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/basedpyright
	$(VENV)/bin/pytest -q tests/proto/test_generated.py

# The figures of docs/benchmarks.md, on this machine: make bench ARGS="--repeats 15"
bench: $(RUN_VENV)/.run
	$(RUN_VENV)/bin/python bench/decode.py $(ARGS)
	$(RUN_VENV)/bin/python bench/footprint.py

# Which of mlx-lm's model classes run here, on one node and split
bench-families: $(VENV)/.dev
	$(VENV)/bin/python bench/families.py --json bench/results/families.json $(ARGS)
	$(VENV)/bin/python bench/families.py --docs

# What make and the tools made here, .venv among it
clean:
	rm -rf $(VENV) build bench/build dist *.egg-info bench/*.egg-info .pytest_cache .ruff_cache .hypothesis

# The stamps: while they are newer than the pins there is nothing to install.
$(VENV)/.dev: $(PINS) $(VENV)/bin/python
	$(call install,$(VENV),$(DEV_EXTRAS),--editable ./bench)
	@$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps mlx-vlm
	@touch $(VENV)/.run $@

$(RUN_VENV)/.run: $(PINS) $(RUN_VENV)/bin/python
	$(call install,$(RUN_VENV),$(RUN_EXTRAS))
	@touch $@

$(RUN_VENV)/.dev-gpu: $(RUN_VENV)/.run
	$(call install,$(RUN_VENV),[$(if $(BACKEND),$(BACKEND)$(comma))dev])
	@touch $@

define install
@echo 'Installing exo-node$(2) into $(1): minutes at first, seconds later'
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(1)/bin/python -m ensurepip
@$(1)/bin/python -m pip install --quiet 'pip>=22.3'
@$(1)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.$(2)' $(3)
endef

$(sort $(VENV)/bin/python $(RUN_VENV)/bin/python):
	@without=; \
	for python in $(PYTHONS); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	    exec $$python -m venv $(@:/bin/python=); \
	  fi; \
	  without=$${without:-$$($$python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')}; \
	done; \
	if [ -n "$$without" ]; then \
	  echo "exo-node: $$without has no ensurepip, so it cannot make an environment: install it (Debian, Ubuntu: sudo apt install $$without-venv) and run make again." >&2; \
	else \
	  echo "exo-node needs Python 3.11 or newer, and none of $(PYTHONS) on the PATH is: install it (macOS: brew install python@3.13; Debian from 12, Ubuntu from 24.04: sudo apt install python3 python3-venv; where apt has an older one: \`uv python install 3.13\`, pyenv, or Ubuntu's PPA deadsnakes with python3.13-venv) and run make again." >&2; \
	fi; \
	exit 1
