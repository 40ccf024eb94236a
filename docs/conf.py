"""The site of the documents: `make docs` builds it into `site/html/` with Sphinx; docs/adr/0021-site.md says why so.

The source directory is that of the project, so that a relative link means the same here as on a code host, and pages
outside of `docs/` may be linked to. The navigation is what `docs/index.md` and `docs/adr/README.md` list.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from sphinx.application import Sphinx

project = "ansor_mlflow"
release = version = importlib.metadata.version(project)
copyright = "the authors of ansor_mlflow"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["*.md", "benchmarks/*.md", "docs/**"]
exclude_patterns = [".*", "site", "mlruns", "**/.ipynb_checkpoints"]

# A heading is linked to by the name that code hosts give it.
myst_heading_anchors = 4
# Notebooks show what they showed when they were last run, which tests do: see CONTRIBUTING.md.
nb_execution_mode = "off"

# Examples leave out parts with an ellipsis.
suppress_warnings = ["misc.highlighting_failure"]

# Docstrings are written as Markdown's plainest part: what stands in backticks is code.
default_role = "code"
autodoc_typehints = "none"
autodoc_default_options = {
    "members": True,
    "undoc-members": True,  # the fields of results
    "member-order": "bysource",
    "exclude-members": "report, page",  # what makes tables of results
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"{project} {release}"
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False

NAVIGATION = {"docs/index", "docs/adr/README"}


def toctree_of(group: str, links: list[tuple[str, str]]) -> str:
    """A group of pages in Sphinx's words, each called as the link to it is."""
    pages = "\n".join(f"{text} <{re.sub(r'[.](md|ipynb)$', '', link)}>" for text, link in links)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {group}\n\n{pages}\n```\n"


def add_navigation(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes the navigation of what a page lists below each heading: a list that code hosts show, too."""
    if docname not in NAVIGATION:
        return
    groups = re.split(r"^#+ (.*)$", source[0], flags=re.M)[1:]
    for group, text in zip(groups[::2], groups[1::2], strict=True):
        if links := re.findall(r"^(?:-|\d+\.) \[([^]]*)\]\(([^)#]*)\)", text, re.M):
            source[0] += toctree_of(group, links)


def escape_parameters(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Makes text of what Sphinx would read as markup in the lines of parameters, which may end within code."""
    start = lines.index("Args:") if "Args:" in lines else len(lines)
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    for place in range(start, end):
        line = lines[place].replace("|", r"\|")
        lines[place] = line.replace("`", r"\`") if line.count("`") % 2 else line


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Sends who asks for the site's root to the index, which is in `docs/` as the other pages are."""
    if error is None and app.builder.format == "html":
        to_index = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        Path(app.outdir, "index.html").write_text(f"<!doctype html><title>{project}</title>{to_index}\n")


def setup(app: Sphinx) -> None:
    """Adds what this file does to a build."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", escape_parameters, priority=400)  # before it is read as Google's style
    app.connect("build-finished", add_front_page)
