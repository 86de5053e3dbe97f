"""The documentation site: `make docs` builds it with Sphinx from the same Markdown files that a code host shows.

Everything that a page needs is in the built folder: no font, script or picture comes from another host, and the search
index is a script, so that search also works from `file://`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from navigation import ROOT, read_groups
from sphinx.addnodes import pending_xref

if TYPE_CHECKING:
    from docutils.nodes import document
    from sphinx.application import Sphinx

project = "MindSpeed-MM"
html_title = project
language = "en"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md", "examples/*/README.md", "benchmarks/README.md"]
exclude_patterns = [
    "AGENTS.md",
    ".*",
    "build",
    "dist",
    "runs",
    "mindspeed_mm",
    "tests",
    "checkpoint",
    "**/node_modules",
]

myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "text"
pygments_style = "tango"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

GROUPS = read_groups()
LISTED = {page.relative_to(ROOT).with_suffix("").as_posix() for pages in GROUPS.values() for page in pages}


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the navigation to the front page; mark pages that the index does not list as reached by links alone."""
    if name == root_doc:
        for heading, pages in GROUPS.items():
            names = [page.relative_to(ROOT).with_suffix("").as_posix() for page in pages]
            source[0] += "\n```{toctree}\n:hidden:\n:caption: " + heading + "\n\n" + "\n".join(names) + "\n```\n"
    elif name not in LISTED:
        source[0] = "---\norphan: true\n---\n" + source[0]


def show_names_of_files(app: Sphinx, doctree: document) -> None:
    """Turn links to folders of the checkout, and to files that are no pages of the site, into their text."""
    here = (ROOT / app.env.docname).parent
    for node in list(doctree.findall(pending_xref)):
        if node["reftype"] != "myst":
            continue
        target = node["reftarget"]
        is_page = node.get("refdomain") == "doc"
        is_outside = is_page and target not in app.env.found_docs and (ROOT / f"{target}.md").is_file()
        if is_outside or (here / target).is_dir():
            node.replace_self(node.children)


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Copy the front page to `index.html`, the name that browsers and servers open in a folder."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the three functions above to Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", show_names_of_files)
    app.connect("build-finished", write_index)
