# What a contributor runs. Each target makes the environment that it needs below .venvs/ (pins and
# details: tests/environments/) and finds it made the next time.
# ARGS go on to pytest: make test ARGS="-k restore -x"

ENVIRONMENT := python3 tests/environments/environment.py
# Two processes, a file of tests to each: a file's tests share an engine.
PYTEST := python -m pytest -n 2 --dist loadfile

.PHONY: help test test-full lint demo clean clean-all

help:
	@echo "make demo       a chat against the real vllm serve on the emulated device, cold and cached"
	@echo "make test       unit and engine tests (ARGS=... for pytest)"
	@echo "make test-full  the same, with the long forms"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove what runs and caches left; clean-all: the environments too"

test:
	@$(ENVIRONMENT) gaudi-or-dev -- $(PYTEST) -m "not slow" $(ARGS)

test-full:
	@$(ENVIRONMENT) gaudi-or-dev -- $(PYTEST) $(ARGS)

lint:
	@$(ENVIRONMENT) dev -- ruff check .
	@$(ENVIRONMENT) dev -- mypy

demo:
	@$(ENVIRONMENT) gaudi-or-dev -- python tests/demo/demo.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venvs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf .venvs
