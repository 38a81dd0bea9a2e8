# Two commands are enough: `make demo` and `make test`. Both make .venv first, once.

PYTHON_IN_VENV := .venv/bin/python
READY := .venv/.ready
SCRIPTS := $(wildcard launch/*.sh launch/*.sbatch .ci/*.sh) .ci/run

# The demo and the tests run on the CPU, one thread per rank, with a compile cache of their own.
export DS_ACCELERATOR := cpu
export OMP_NUM_THREADS := 1
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.venv/torch_extensions
# Bytecode is kept, whatever the environment says: launched ranks import the package anew, 1.7 s of CPU each without it.
export PYTHONDONTWRITEBYTECODE :=
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help demo demo-megatron nodes test test-all test-matrix test-real-bugs compare-versions compare-releases test-package test-versions scale unchanged house works readme docs lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: $(READY) ## fine-tune the embedded model in each scenario on 4 CPU ranks and compare them (5 minutes)
	@sh .ci/setup.sh unlock
	@$(PYTHON_IN_VENV) launch/demo.py

demo-megatron: $(READY) ## Megatron-core on 4 CPU ranks, healthy and with faults of public issues (2 minutes)
	@$(PYTHON_IN_VENV) launch/demo_megatron.py

nodes: $(READY) ## two nodes on this machine, as root: a rank, a node and the network fail, the training goes on (10 minutes)
	@$(PYTHON_IN_VENV) benchmarks/nodes.py

test: lint ## lint, then the tests in real processes, but for the long ones
	@sh .ci/setup.sh unlock
	@echo "test: pytest ..."
	@$(PYTHON_IN_VENV) -m pytest -n 2 --dist worksteal

test-all: lint ## all that `make test` runs, and the long ones: before a change is merged (45 minutes)
	@sh .ci/setup.sh unlock
	@echo "test-all: pytest ..."
	@$(PYTHON_IN_VENV) -m pytest -n 2 --dist worksteal -m "not matrix and not readme"

test-matrix: $(READY) ## the full configuration matrices (tens of minutes)
	@sh .ci/setup.sh unlock
	@DS_SILENT_COLD=1 $(PYTHON_IN_VENV) -m pytest -m matrix

test-real-bugs: $(READY) ## released versions of frameworks that train wrongly: what is found (40 minutes)
	@$(PYTHON_IN_VENV) benchmarks/real_bugs.py
	@$(PYTHON_IN_VENV) benchmarks/released_bugs.py

GOOD ?= 0.18.3
BAD ?= 0.19.8
compare-versions: $(READY) ## where two releases of DeepSpeed part: GOOD=0.18.3 BAD=0.19.8, by halves (10 minutes)
	@sh .ci/setup.sh unlock
	@ds-silent bisect deepspeed --good "$(GOOD)" --bad "$(BAD)" --directory build/bisect -- \
		torchrun --standalone --nproc_per_node 2 -m ds_silent benchmarks/compare_versions.py || \
		test $$? -eq 1 # they part, which is the answer

compare-releases: $(READY) ## where releases with a bug part from those without it, 18 pairs (15 minutes)
	@$(PYTHON_IN_VENV) benchmarks/released_bugs.py --compare

test-package: ## build the wheel and run it in fresh environments, alone and with each extra (10 minutes)
	@sh .ci/test_package.sh

test-versions: $(READY) ## other versions of Python, torch, DeepSpeed, Megatron-core and transformers (an hour, 20 GB of disk)
	@$(PYTHON_IN_VENV) benchmarks/versions.py

scale: $(READY) ## what observing costs and finds at 8 to 16,384 simulated ranks (20 minutes)
	@$(PYTHON_IN_VENV) benchmarks/scale.py

unchanged: $(READY) ## whether records are what they were before code was moved (3 minutes; --keep first, see the file)
	@$(PYTHON_IN_VENV) benchmarks/unchanged.py

house: $(READY) ## the shape of the package in numbers: lines, files, floors, circles
	@$(PYTHON_IN_VENV) benchmarks/house.py

works: $(READY) ## write the page of what works where, from trainings (half an hour)
	@$(PYTHON_IN_VENV) benchmarks/works.py

readme: $(READY) ## every command of the documentation that takes minutes, as it stands (hours)
	@sh .ci/setup.sh unlock
	@$(PYTHON_IN_VENV) -m pytest -m readme -rA

docs: $(READY) ## write what the pages take from the code (the block's keys, the schemas), and build them as a site
	@$(PYTHON_IN_VENV) benchmarks/block_table.py docs/block.md
	@$(PYTHON_IN_VENV) -m ds_silent.commands.schema docs/schemas
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html; for its search: .venv/bin/python -m http.server -d build/site"

lint: $(READY) ## ruff, mypy and shellcheck
	@echo "lint: ruff, mypy, shellcheck ..."
	@ruff check .
	@ruff format --check .
	@mypy
	@shellcheck $(SCRIPTS)

format: $(READY) ## let ruff put the code in order
	@ruff check --fix .
	@ruff format .

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt .ci/setup.sh
	@sh .ci/setup.sh
