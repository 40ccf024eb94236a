# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"
# Files with the longest timeouts come first, so that no worker is alone with one of them at the end.
LONGEST_FIRST := -n 3 --dist loadfile --no-loadscope-reorder
PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: demo test test-system test-faults lint clean

.venv: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip || { rm -rf .venv; exit 1; }
	.venv/bin/python -m pip install --quiet --editable '.[dev]' || { rm -rf .venv; exit 1; }
	touch .venv

# .venv and PyTorch, for the tests of its programs. It is apart because TVM imports PyTorch wherever it is installed,
# which takes every process two seconds. A .pth file makes it find what is in .venv, pip among the rest.
.venv/torch: .venv
	.venv/bin/python -m venv --without-pip .venv/torch
	.venv/bin/python $(PACKAGES) > "$$(.venv/torch/bin/python $(PACKAGES))/base.pth"
	.venv/torch/bin/python -m pip install --quiet --editable '.[torch]' || { rm -rf .venv/torch; exit 1; }
	touch .venv/torch

# The system of an emulated board, for the tests of other architectures: Python for aarch64, with TVM from its wheel.
.board: .venv tests/helpers/make_board.sh
	tests/helpers/make_board.sh .board .venv/bin/python || { rm -rf .board; exit 1; }
	touch .board

# Tunes, compiles and evaluates ResNet-18 on this machine; results go to mlflow.db and mlruns/ here.
demo: .venv
	$(RUN) mlflow run . --env-manager local -P network=resnet-18

test: .venv/torch
	$(RUN) python -m pytest -m "not system and not faults" -n 3 --dist loadfile

# Whole pipelines, servers, and what MLflow's user interface shows, in Debian's Chromium, which .ci/run installs, and
# CONTRIBUTING.md names. With SCREENSHOTS=docs/images the tunings of test_browser.py are longer, and make the pictures of
# the documentation. The tests of other architectures need Debian's cross compiler and emulator for aarch64.
test-system: .venv/torch .board
	$(RUN) python -m pytest -m system $(LONGEST_FIRST)

# Servers and processes are really broken: Ceph's S3 gateway and PostgreSQL among them, which are Debian packages;
# .ci/run installs them, CONTRIBUTING.md names them, and a test that misses them fails with their names.
test-faults: .venv
	$(RUN) python -m pytest -m faults $(LONGEST_FIRST)

lint: .venv
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean:
	rm -rf .venv .board .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -exec rm -rf {} +
