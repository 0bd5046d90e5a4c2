"""The wheel that ``pip install .`` makes and the source archive: their files, metadata, and that they run alone."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import common
from tests.readmes import readmes

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "fairseq_plugin", "timm_plugin")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the checkout's files."""
    source = tmp_path_factory.mktemp("source") / "lineartime"
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", *ignored))
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """The wheel of the copy, made without a network and without touching the checkout."""
    dist = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    """The wheel's own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_file_of_the_three_packages_and_nothing_else(wheel):
    """Modules, data, READMEs and the markers that the packages are typed; no tests, no recipes."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    expected = {str(path.relative_to(ROOT)) for path in paths if path.is_file() and path.parent.name != "__pycache__"}
    assert {"common/ops/flow/interface.py", "fairseq_plugin/py.typed", "timm_plugin/README.md"} <= expected
    assert len([name for name in names if name.endswith("/model.safetensors")]) == 2
    assert names == expected
    assert wheel.name.startswith("lineartime-") and wheel.name.endswith("-py3-none-any.whl")


def test_the_metadata_names_the_extras_and_the_core_needs_torch_alone(metadata):
    """Hosts are extras. The version is that of the changelog's first section; the citation has the latest release."""
    assert metadata["Name"] == "lineartime"
    assert metadata["Version"] == common.__version__
    parts = re.findall(r"^## \[([\d.]+)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert parts[0][0] == common.__version__.removesuffix(".dev0")
    assert (parts[0][1] == "unreleased") == common.__version__.endswith(".dev0")
    released = next(version for version, date in parts if date != "unreleased")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == released
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(required) == 1 and required[0].startswith("torch>=")
    for extra in metadata.get_all("Provides-Extra"):
        assert any(f'extra == "{extra}"' in line for line in metadata.get_all("Requires-Dist")), extra
    pages = "\n".join(path.read_text() for path in readmes())
    named = re.findall(r"pip install [^\n]*\.\[([\w,-]+)\]", pages)
    asked = {extra for names in named for extra in names.replace("_", "-").split(",")}
    assert asked and asked <= set(metadata.get_all("Provides-Extra"))
    assert (
        set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"} and metadata["License-Expression"] == "MIT"
    )


def test_the_unpacked_wheel_works_alone(wheel, tmp_path):
    """The core runs from a folder that holds nothing but the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys, common, torch; from common.attention import build_attention; x = torch.randn(1, 2, 9, 4); "
        "print(build_attention('flow', causal=True)(x, x, x).shape == x.shape, common.__file__)"
    )
    run = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "site")}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", str(tmp_path / "site" / "common" / "__init__.py")]


def test_the_source_archive_is_the_whole_tree_and_its_tests_run(source, tmp_path):
    """Tests need the recipes, the READMEs and each other's folders, so they only run if all of these are included."""
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    expected = {name for name in expected if not name.startswith((".ci/", "build/")) and ".egg-info/" not in name}
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / path.name.removesuffix(".tar.gz")
    assert expected - {str(path.relative_to(root)) for path in root.rglob("*")} == set()
    assert {"tests/processes.py", "recipes/demo/__main__.py", "tests/golden/fairseq/dict.txt"} <= expected
    rules = ["tests/test_house_rules.py", "-k", "no_line or same_ruff"]
    for arguments in (rules, ["--collect-only", "tests/common/test_kernels.py"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
