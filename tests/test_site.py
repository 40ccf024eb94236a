"""The documents are a site: every page has a place in it, every link leads somewhere, and the reference is whole."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.commands import ROOT

import ansor_mlflow as am

DOCS = ROOT / "docs"
LISTS = [DOCS / "index.md", DOCS / "adr" / "README.md"]
"""The pages whose lists are the navigation."""


def listed(page: Path) -> list[Path]:
    """The files that the lists of a page link to."""
    links = re.findall(r"^(?:-|\d+\.) \[[^]]*\]\(([^)#]*)\)", page.read_text(), re.M)
    return [(page.parent / link).resolve() for link in links]


def test_every_page_has_one_place_in_the_navigation() -> None:
    pages = {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")} - {LISTS[0]}
    places = Counter(path for page in LISTS for path in listed(page))
    assert pages <= places.keys()
    assert set(places.values()) == {1}
    assert all(path.is_file() for path in places)


def test_the_index_has_five_groups() -> None:
    assert re.findall(r"^## (.*)$", LISTS[0].read_text(), re.M) == [
        "Start",
        "Tune",
        "Compare and promote",
        "Serve",
        "Reference",
    ]


@pytest.mark.system
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"^\t\$\(RUN\) (python -m sphinx .*)$", (ROOT / "Makefile").read_text(), re.M)
    command = [sys.executable, *recipe.replace(" site/", f" {tmp_path}/").split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "html" / "docs" / "api.html").read_text()
    assert set(am.__all__) <= set(re.findall(r'id="ansor_mlflow\.(\w+)"', reference))
    assert (tmp_path / "html" / "searchindex.js").is_file()
    assert "docs/index.html" in (tmp_path / "html" / "index.html").read_text()
