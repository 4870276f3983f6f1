# make train   install what is needed and train CartPole-v1 to a solved score, then evaluate it
# make test    install what is needed and run the tests
# make test-plain  the same tests without kernels, by the plain code alone
# make lint    check format and style
# make types   check the annotations of the public API
# make docs    build the site of documentation strictly into build/site
# make learn   the longer small tasks, and references whose seeds take ten minutes at most (two hours, resumable)
# make lag     what policy lag costs, with parts of the objective left out (two hours, resumable)
# make bench   throughput of the standard workloads
# make peers   throughput, time to score and learning beside other trainers (builds 8 GB of environments; hours)
# make screenshot  a run's page in headless Chromium: checks that curves and video show, keeps docs/report.png
# make package wheel and sdist in dist/, installed and tried in empty environments (minutes, and gigabytes of packages)
# make starts  50 starts and stops in a row
# make gpu-wheels  wheels for perf/gpu.sh on a machine without a network; ONLY="base atari" for some of them
# make soak    half an hour of training under faults of every kind

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
RUN ?= runs/cartpole
WHEELS ?= wheels
PARALLEL := -n auto --maxprocesses 4 --dist worksteal # each process takes up to 1.5 GiB, and starts runs of its own

.PHONY: train test test-plain lint types docs learn lag bench peers screenshot package starts gpu-wheels soak clean

train: .venv/user
	$(BIN)/python -m sfactory.train --env CartPole-v1 --steps 300000 --run $(RUN)
	$(BIN)/python -m sfactory.eval --run $(RUN) --episodes 20

test: .venv/dev
	$(BIN)/python -m pytest -m "not long" $(PARALLEL)

test-plain: .venv/dev
	SFACTORY_KERNELS=off $(BIN)/python -m pytest -m "not long" $(PARALLEL)

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy looks for sfactory.envs where its name says: in a folder of links that has the packages as they are installed.
types: .venv/dev
	rm -rf build/types && mkdir -p build/types/sfactory
	ln -s $(CURDIR)/sfactory/* $(CURDIR)/envs build/types/sfactory
	cd build/types && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir ../mypy

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

learn: .venv/dev
	$(BIN)/python -m pytest -m long --ignore tests/test_packaging.py
	$(BIN)/python -m perf.learning --record; missed=$$?; $(BIN)/python -m perf.results && \
		$(BIN)/python -m perf.learning_plots --all && exit $$missed

lag: .venv/dev
	$(BIN)/python -m perf.lag
	$(BIN)/python -m perf.lag --variants no-tv
	$(BIN)/python -m perf.lag --lags 1 8 --tasks hopper lunarlander \
		--variants stale weight-first recomputed rows uncorrected
	$(BIN)/python -m perf.lag --figure docs/lag.svg

bench: .venv/dev
	$(BIN)/python -m perf.fps

peers: .venv/dev
	$(BIN)/python -m perf.peers --build
	$(BIN)/python -m perf.peers --record
	$(BIN)/python -m perf.peers --to-score --record
	$(BIN)/python -m perf.learning --peer stable-baselines3 --seeds 11 12 --record
	$(BIN)/python -m perf.learning --peer sample-factory --seeds 11 12 --record
	$(BIN)/python -m perf.results
	$(BIN)/python -m perf.learning_plots

screenshot: .venv/dev
	$(PIP) playwright
	-$(BIN)/playwright install chromium # without it the system's is taken
	$(BIN)/python -m sfactory.train --env CartPole-v1 --steps 300000 --eval.every 25000 --log.report-every-s 0.5 \
		--run runs/cartpole --overwrite
	$(BIN)/sfactory report runs/cartpole --episodes 20 --video
	$(BIN)/python docs/screenshot.py runs/cartpole docs/report.png

package: .venv/dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest -m long tests/test_packaging.py

starts: .venv/dev
	$(BIN)/python -m perf.starts

gpu-wheels:
	$(PYTHON) perf/gpu_packages.py gather $(WHEELS) $(ONLY)

soak: .venv/dev
	$(BIN)/python -m perf.soak

clean:
	rm -rf .venv build dist sfactory.egg-info

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first: a package that merely asks for torch must find the pinned one installed.
.venv/torch: .venv/bin/python constraints.txt
	$(PIP) torch
	touch $@

.venv/user: .venv/torch setup.py pyproject.toml
	$(PIP) -e .
	touch $@

.venv/dev: .venv/torch setup.py pyproject.toml
	$(PIP) -e .[dev]
	touch $@
