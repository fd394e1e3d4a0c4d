# make demo    calibrate a real model and answer from a 2-bit KV cache, on a CPU or a GPU
# make test    all tests            make test-fast   without those marked slow
# make lint    format, lint, types  make bench       kernels (needs a GPU)

PYTHON ?= python3
SGLANG ?= 0.5.17
VENV   ?= .venv
RUN    := $(VENV)/bin/python

.PHONY: demo test test-sglang test-fast lint format bench env clean

env:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --sglang $(SGLANG) --dev

demo: env
	@$(RUN) scripts/demo.py

test: env
	$(RUN) -m pytest

# What depends on SGLang's version; CI runs it on the second version as well.
test-sglang: env
	$(RUN) -m pytest -m sglang

test-fast: env
	$(RUN) -m pytest -m "not slow"

lint: env
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: env
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: env
	$(RUN) scripts/bench_kernels.py

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
