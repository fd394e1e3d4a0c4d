# make demo    calibrate a real model and answer from a 2-bit KV cache, on a CPU or a GPU
# make test    all tests            make test-fast   without those marked slow
# make lint    format, lint, types  make bench       kernels (needs a GPU)

PYTHON ?= python3
SGLANG ?= 0.5.17
VENV   ?= .venv
RUN    := $(VENV)/bin/python

.PHONY: demo test test-versions test-fast lint format bench env clean

env:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --sglang $(SGLANG) --dev

demo: env
	@$(RUN) scripts/demo.py

test: env
	$(RUN) -m pytest

# What depends on the versions of SGLang and transformers; CI runs it on the second pair as well.
test-versions: env
	$(RUN) -m pytest tests/serving tests/unit/test_calibration_capture.py tests/unit/test_simulation.py

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
