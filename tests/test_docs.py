"""The documentation site: a broken link fails its build, others lead to pages or copies, and docstrings are read."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from common.attention import FlowAttention
from tests.processes import CHECKOUT

pytest.importorskip("furo")
pytest.importorskip("myst_parser")
pytest.importorskip("sphinx")

SETTINGS = CHECKOUT / ".ci" / "docs"
PAGES = {
    "README.md": "# Start\n\n[core](common/) [part](common/part.md#two-words) [code](code.py) [kernels](common/cpu/)\n",
    "common/README.md": "# Core\n",
    "common/part.md": "# Part\n\n## Two words\n\nAn unusual word: zygote.\n",
    "common/cpu/__init__.py": '"""Kernels."""\n',
    "code.py": "x = 1\n",
    "recipes/README.md": (
        "# Broken\n\n[file](absent.md) [heading](../common/part.md#absent-heading) [folder](absent_folder/)\n"
        "![picture](absent.png)\n"
    ),
}


class Site(NamedTuple):
    """A site of a few pages: the exit status of its build, its warnings, and its folder."""

    status: int
    warnings: list[str]
    folder: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """The site of ``PAGES``, built as ``make docs`` builds that of the checkout."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name, text in PAGES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    makefile = (CHECKOUT / "Makefile").read_text()
    words = re.search(r"^\t\S+python (-m sphinx .*) \. build/docs$", makefile, re.MULTILINE)[1].split()
    done = subprocess.run([sys.executable, *words, source, folder], cwd=CHECKOUT, capture_output=True, text=True)
    return Site(done.returncode, [line for line in done.stderr.splitlines() if "WARNING" in line], folder)


def test_a_broken_link_fails_the_build(site):
    """Each of the four is named: a missing file, heading, folder and picture. Links of the other pages are good."""
    assert site.status != 0
    for target in ("absent.md", "absent-heading", "absent_folder", "absent.png"):
        assert sum(target in line for line in site.warnings) == 1, "\n".join(site.warnings)
    assert len(site.warnings) == 4, "\n".join(site.warnings)


def test_links_lead_to_pages_of_folders_headings_and_copies_of_files(site):
    page = (site.folder / "README.html").read_text()
    assert 'href="common/README.html"' in page
    assert 'href="common/part.html#two-words"' in page
    copies = {name: site.folder / path for path, name in re.findall(r'href="(_downloads/[^"]+/([^"/]+))"', page)}
    assert copies["code.py"].read_text() == PAGES["code.py"]
    assert copies["__init__.py"].read_text() == PAGES["common/cpu/__init__.py"]


def test_every_page_is_in_the_navigation_and_the_search_and_the_site_has_an_index(site):
    """A page is listed below the README of its folder."""
    start = (site.folder / "README.html").read_text()
    assert re.search(r'toctree-l1[^>]*>\s*<a[^>]*href="common/README.html"', start)
    assert re.search(r'toctree-l2[^>]*>\s*<a[^>]*href="common/part.html"', start)
    assert "zygot" in (site.folder / "searchindex.js").read_text()
    assert "README.html" in (site.folder / "index.html").read_text()


def test_docstrings_have_norms_and_the_options_of_a_mechanism():
    """``|x|`` is no substitution of reST, except in code; options come from the declaration."""
    prepare = runpy.run_path(str(SETTINGS / "conf.py"))["prepare_docstring"]
    lines = ["Divided by |x|, unlike ``a | b``."]
    prepare(None, "class", "FlowAttention", FlowAttention, None, lines)
    assert lines[0] == r"Divided by \|x\|, unlike ``a | b``."
    for option in FlowAttention.Options.described():
        assert sum(line.startswith(f"* ``{option}``") for line in lines) == 1
