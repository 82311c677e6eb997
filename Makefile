# Each target sets up all it needs in .venv the first time, from Python 3.11+ and make alone.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow test-gpu test-clusters lint docs bench bench-gpu bench-finetune needs-gpu soak clean help

help:
	@echo "make demo       train a small language model on this machine"
	@echo "make test       lint, types and the default tests"
	@echo "make test-slow  the tests that take minutes (compilers)"
	@echo "make test-gpu   what only a GPU can show; writes docs/gpu.md"
	@echo "make test-clusters  a real SLURM, a real Ray and a Jupyter kernel on this machine; installs them (as root, Debian); writes docs/clusters.md"
	@echo "make docs       the docs as a site with search, in build/site"
	@echo "make bench      what the training loop and a save cost, beside peers; writes docs/benchmarks.md"
	@echo "make bench-gpu  BDH and Llama beside peers, on one GPU; writes docs/benchmarks.md (PUBLIC_BDH=a clone of pathwaycom/bdh)"
	@echo "make bench-finetune  QLoRA, LoRA and full fine-tuning beside peers, on one GPU; writes docs/benchmarks.md"
	@echo "make soak       an hour of training under faults; writes docs/soak.md (SECONDS=480: shorter)"
	@echo "make clean      remove .venv and caches (runs/ stays)"

demo: .venv/.ready
	$(BIN)/shoal demo

test: .venv/.ready-dev lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: .venv/.ready-dev
	$(BIN)/python -m pytest -m "slow and not gpu and not clusters"

test-gpu: .venv/.ready-dev
	$(BIN)/python -m pytest -m "gpu"

test-clusters: .venv/.ready-clusters
	$(BIN)/python -m pytest -m clusters -p tests.clusters_page

lint: .venv/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

bench: .venv/.ready-bench
	$(BIN)/python benchmarks/loop_overhead.py --write docs/benchmarks.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/async_save.py --write docs/benchmarks.md

needs-gpu: .venv/.ready-bench
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "this needs a GPU, and torch sees none"; exit 1; }

bench-gpu: needs-gpu
	$(BIN)/python benchmarks/bdh.py $(if $(PUBLIC_BDH),--public $(PUBLIC_BDH)) --at-once 4 --write docs/benchmarks.md
	$(BIN)/python benchmarks/llama.py --steps 8 --at-once 4 --cases "raw;single, loss in 8 chunks" --write docs/benchmarks.md
	$(BIN)/python benchmarks/llama.py --fp8 --steps 8 --write docs/benchmarks.md
	$(BIN)/python benchmarks/llama.py --large --steps 5 --cases "transformers, bf16;8B, bf16" --write docs/benchmarks.md

bench-finetune: needs-gpu
	$(BIN)/python benchmarks/qlora.py --steps 8 --cases "peer;shoal, recomputed, compiled;shoal, compiled" --write docs/benchmarks.md
	$(BIN)/python benchmarks/qlora.py --length 512 --steps 12 --at-once 5 --cases "peer;shoal, recomputed, compiled;shoal, compiled;recorded" --write docs/benchmarks.md
	$(BIN)/python benchmarks/qlora.py --kind lora --steps 6 --cases "peer;shoal, recomputed, compiled" --write docs/benchmarks.md
	$(BIN)/python benchmarks/qlora.py --kind full --steps 8 --write docs/benchmarks.md

soak: .venv/.ready
	$(BIN)/python scripts/soak.py --seconds $(or $(SECONDS),3600)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "shoal needs Python 3.11 or newer; try make PYTHON=python3.11"; exit 1; }
	@echo "setting up .venv (once; torch is large)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --editable .
	@touch $@

.venv/.ready-dev: .venv/.ready
	@echo "adding what the tests need"
	@$(PIP) --editable '.[dev]'
	@touch $@

.venv/.ready-clusters: .venv/.ready-dev
	@echo "adding Ray, Kubernetes' models, a Jupyter kernel and, where apt-get may, SLURM"
	@$(PIP) --editable '.[clusters]'
	@command -v slurmctld >/dev/null || { apt-get update -qq && apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client; } || echo "SLURM is not installed; its tests are skipped"
	@touch $@

.venv/.ready-docs: .venv/.ready
	@echo "adding what builds the site"
	@$(PIP) --editable '.[docs]'
	@touch $@

.venv/.ready-bench: .venv/.ready
	@echo "adding the peers to measure against"
	@$(PIP) --editable '.[bench]'
	@touch $@
