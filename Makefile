# Two commands do everything, set-up included: `make demo` and `make test`. PYTHON= names another interpreter.
export PYTHON
# Small problems in several processes: threads that spin while they wait would take the cores from one another.
QUIET_THREADS = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# One more than there are cores: many tests wait for processes that they have started.
WORKERS = $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))

.PHONY: setup demo demo-points demo-text test test-slurm lint bench api

setup:
	@./setup.sh

demo: setup
	@.venv/bin/python -m experiments.demo

demo-points: setup
	@.venv/bin/python -m experiments.demo shapes_set

demo-text: setup
	@.venv/bin/python -m experiments.demo movie_sentences

# Times and memory against the peers; CSV files and a figure in runs/benchmarks. On an idle machine.
bench: setup
	@.venv/bin/python -m experiments.benchmarks

# fairseq changes logging, Hydra and torch for the whole process when it is imported: its tests have processes of their own.
test: setup
	$(QUIET_THREADS) .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/fairseq_sinkhorn --ignore=tests/slurm/cluster
	$(QUIET_THREADS) .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/fairseq_sinkhorn

# On a real SLURM of two nodes, which slurm/dev_cluster brings up on this machine: Debian, as root.
test-slurm: setup
	@trap slurm/dev_cluster/down EXIT && exported=$$(slurm/dev_cluster/up) && eval "$$exported" && \
		$(QUIET_THREADS) .venv/bin/python -m pytest tests/slurm/cluster

# The plugins' docstrings as pages: build/api/index.html.
api: setup
	.venv/bin/python -m pdoc -d google -o build/api sinkhorn_attention sinkhorn_attention.normalizers timm_sinkhorn pyg_sinkhorn

lint: setup
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy plugins experiments slurm
