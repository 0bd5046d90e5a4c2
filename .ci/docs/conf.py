"""Settings of Sphinx for the documentation site: every Markdown page of the checkout, and the public API.

``make docs`` builds it in ``build/docs``. The source folder is the root of the checkout, so pages stay where they are
and their links are those of the repository. A link to a folder leads to the page of the folder or, if it has none, to
the file whose docstring says what the folder is. A link to a file that is no page leads to a copy of it in the site.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import common

FOLDERS = ("common", "fairseq_plugin", "recipes", "timm_plugin")
API = "recipes/guides/api/api"
#: Pages below the first one, before all others. Pages below these are in the order in which these link them.
FIRST = ("recipes/guides", "fairseq_plugin", "timm_plugin", "common", "recipes")

project = "lineartime"
release = common.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "README"
include_patterns = ["*.md", *(f"{folder}/**.md" for folder in FOLDERS), "recipes/guides/api/**.rst"]
exclude_patterns = ["build", "dist", "work", "tests", "**.egg-info", "**/__pycache__"]
suppress_warnings = ["myst.header"]  # generated pages begin their sections at the third level

myst_heading_anchors = 6  # GitHub's names for headings of all levels
smartquotes = False  # a typed "--" stays

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # the hosts' docstrings are not written for this site
autodoc_member_order = "bysource"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}  # web servers and readers look for index.html


def parent_of(page: str, pages: set[str]) -> str | None:
    """The page that lists ``page``: the first one for ``FIRST``, else the README of its folder or the nearest above."""
    if page == root_doc or page.startswith("recipes/guides/api/"):
        return root_doc if page == API else None  # the page of the API lists the others itself
    if page.removesuffix("/README") in FIRST:
        return root_doc
    folders = PurePosixPath(page).parents
    return next(str(folder / "README") for folder in folders if str(folder / "README") in pages - {page})


def lead_folders(source: str, folder: Path) -> str:
    """The text of a page in ``folder``, with links to folders replaced by links to what describes the folder."""

    def link(match: re.Match) -> str:
        linked = folder / match[1]
        names = ("README.md", f"{linked.name}.md", "__init__.py") if linked.is_dir() else ()
        page = next((name for name in names if (linked / name).exists()), None)
        return match[0] if page is None else f"]({PurePosixPath(match[1]) / page})"

    return re.sub(r"\]\(([^)\s#:]+)\)", link, source)


def linked_pages(source: str, folder: Path, root: Path) -> list[str]:
    """The pages and folders that the text of a page in ``folder`` links, in order, as names of pages."""
    targets = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", source)
    return [str((folder / target).resolve().relative_to(root.resolve())).removesuffix(".md") for target in targets]


def prepare_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Complete a Markdown page before it is parsed: links to folders, and the pages below it in the navigation."""
    path = Path(app.env.doc2path(page))
    if path.suffix == ".md":
        pages = set(app.env.found_docs)
        listed = [child for child in pages if parent_of(child, pages) == page]
        order = [f"{folder}/README" for folder in FIRST] + linked_pages(source[0], path.parent, Path(app.srcdir))
        listed.sort(key=lambda child: (order.index(child) if child in order else len(order), child))
        entries = "".join(f"/{child}\n" for child in listed)
        navigation = f"\n\n```{{toctree}}\n:hidden:\n\n{entries}```\n" if entries else ""
        source[0] = lead_folders(source[0], path.parent) + navigation


def prepare_docstring(app: Sphinx, what: str, name: str, described: Any, options: Any, lines: list[str]) -> None:
    """Complete a docstring before it is parsed: ``|x|`` is a norm, and a mechanism's options follow its docstring."""
    escaped = re.sub(r"(``.*?``)|\|", lambda match: match[1] or r"\|", "\n".join(lines), flags=re.DOTALL)
    lines[:] = [line for line in escaped.split("\n") if not line.startswith("Alias for field number")]  # Python's own
    if what == "class" and (declared := getattr(described, "Options", None)) is not None:
        defaults = declared.defaults()
        for option, description in declared.described().items():
            default = f" (default: ``{defaults[option]!r}``)" if option in defaults else ""
            help_text = re.sub(r"([*|_`])", r"\\\1", description.help)
            lines += ["", f"* ``{option}``{default}: {help_text}"]
        lines.append("")


def setup(app: Sphinx) -> None:
    """Connect the functions of this file."""
    app.add_lexer("mermaid", TextLexer)  # drawing a diagram would need a script from another site
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
