"""How Sphinx makes a site of these pages: `make docs`."""

import pathlib
import re

import jax_ep

project = "jax_ep"
author = "The jax_ep authors"
release = version = jax_ep.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 4  # Links to headings are GitHub's.

html_theme = "sphinx_book_theme"
html_title = "jax_ep"
html_theme_options = {"home_page_in_toc": True}

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Shapes and dtypes are in the docstrings.
napoleon_use_ivar = True  # Attributes are described once, with their class.
suppress_warnings = ["ref.python"]  # Attributes of two classes share a name.

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A link to a file that is no page of the site.
ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:\.\./|examples/|LICENSE)[^)]*\)")


def _read(app, name, source):
    """The front page is README; files that are no pages are named, not linked."""
    if name == "index":
        readme = (ROOT / "README.md").read_text()
        source[0] = readme.replace("](docs/", "](") + "\n" + source[0]
    source[0] = ELSEWHERE.sub(r"\1", source[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", _read)
