# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"

.PHONY: demo test test-faults lint clean

.venv: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip || { rm -rf .venv; exit 1; }
	.venv/bin/python -m pip install --quiet --editable '.[dev]' || { rm -rf .venv; exit 1; }
	touch .venv

# Tunes, compiles and evaluates ResNet-18 on this machine; results go to mlflow.db and mlruns/ here.
demo: .venv
	$(RUN) mlflow run . --env-manager local -P network=resnet-18 -P trials=320 -P max_minutes=6

test: .venv
	$(RUN) python -m pytest -m "not faults"

# Servers and processes are really broken.
test-faults: .venv
	$(RUN) python -m pytest -m faults

lint: .venv
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -exec rm -rf {} +
