# What a contributor runs. Each target makes the environment that it needs below .venvs/ (pins and
# details: tests/environments/) and finds it made the next time.
# ARGS go on to pytest: make test ARGS="-k restore -x", ARGS=tests/replay
# The tests run in two parts, each in its environment (tests/environments/suite.py).

ENVIRONMENT := python3 tests/environments/environment.py
SUITE := python3 tests/environments/suite.py

# For test-gpu: one whose torch and Triton know the GPU, as the operator's own vLLM has them.
PYTHON := python3

.PHONY: help test test-full test-gpu lint demo clean clean-all

help:
	@echo "make demo       the real vllm serve: a chat, cold and cached, on the emulated device;"
	@echo "                and answers with long drafts and without, on vLLM's CPU backend"
	@echo "make test       unit and engine tests (ARGS=... for pytest)"
	@echo "make test-full  the same, with the long forms"
	@echo "make test-gpu   the kernels on an NVIDIA GPU (PYTHON=... for the one that knows it)"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove what runs and caches left; clean-all: the environments too"

test:
	@$(SUITE) $(ARGS)

test-full:
	@$(SUITE) --full $(ARGS)

test-gpu:
	@$(PYTHON) -m pytest tests/kernels $(ARGS)

lint:
	@$(ENVIRONMENT) dev -- ruff check .
	@$(ENVIRONMENT) dev -- mypy

demo:
	@python3 tests/demo/demo.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venvs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf .venvs
