"""get_timm_scripts.py with a repository made by the test."""

import subprocess

import pytest
import timm

from recipes.imagenet import get_timm_scripts
from recipes.imagenet.get_timm_scripts import NotFound, get
from tests.recipes.archive_files import zipped
from tests.recipes.server import Page, serve

TAGS = ("v1.2.2", "v1.2.3")


def source_tree(folder, version):
    """Write the relevant files of timm's source tree."""
    (folder / "timm").mkdir(parents=True, exist_ok=True)
    (folder / "timm" / "version.py").write_text(f"__version__ = '{version}'\n")
    for name in ("train.py", "validate.py"):
        (folder / name).write_text(f"print('{name} of {version}')\n")
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository with two tags."""
    folder = tmp_path_factory.mktemp("timm")

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)

    git("init", "--quiet")
    for tag in TAGS:
        source_tree(folder, tag.removeprefix("v"))
        git("add", ".")
        git("commit", "--quiet", "-m", tag)
        git("tag", tag)
    return folder


@pytest.mark.parametrize("tag", TAGS)
def test_from_git(repository, tmp_path, tag):
    assert get(tmp_path / "out", tag, repository) == tag.removeprefix("v")
    assert (tmp_path / "out" / "train.py").read_text() == f"print('train.py of {tag.removeprefix('v')}')\n"
    assert not (tmp_path / "out" / "timm").exists()  # it would hide the installed package from the scripts
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_missing_tag_names_those_there_are(repository, tmp_path):
    with pytest.raises(NotFound, match=r"(?s)v1.2.4.*--tag.*v1.2.3, v1.2.2"):
        get(tmp_path / "out", "v1.2.4", repository)
    assert not (tmp_path / "out").exists()


def test_from_source_tree(tmp_path):
    tree = source_tree(tmp_path / "tree", "1.2.3")
    assert get(tmp_path / "out", "v1.2.3", tree) == "1.2.3"
    with pytest.raises(NotFound, match=r"1.2.3.*v9.9.9"):
        get(tmp_path / "out", "v9.9.9", tree)
    assert (tmp_path / "out" / "train.py").is_file()  # the earlier ones are kept


def test_source_that_is_not_timm(tmp_path):
    (tmp_path / "tree").mkdir()
    with pytest.raises(NotFound, match="allowed: timm's source tree"):
        get(tmp_path / "out", "v1.2.3", tmp_path / "tree")
    with pytest.raises(ValueError, match=r"--from is .*none"):
        get(tmp_path / "out", "v1.2.3", tmp_path / "none")


def test_archive_is_tried_when_git_fails(tmp_path, monkeypatch):
    tree = source_tree(tmp_path / "tree", "1.2.3")
    archive = zipped({f"timm-1.2.3/{path.relative_to(tree)}": path.read_bytes() for path in tree.rglob("*.py")})
    with serve({"/zip/v1.2.3": Page(archive)}) as served:
        monkeypatch.setattr(get_timm_scripts, "REPOSITORY", (tmp_path / "no-repository").as_uri())
        monkeypatch.setattr(get_timm_scripts, "ARCHIVE", served.address + "/zip/{tag}")
        assert get(tmp_path / "out", "v1.2.3") == "1.2.3"
        with pytest.raises(NotFound, match=r"(?s)no-repository.*HTTP Error 404.*--from"):
            get(tmp_path / "out", "v1.2.4")


def test_command(repository, tmp_path, capsys):
    arguments = ["--from", str(repository), "--out", str(tmp_path / "out")]
    assert get_timm_scripts.main(arguments) == 1
    assert f"v{timm.__version__} were not found" in capsys.readouterr().err
    assert get_timm_scripts.main([*arguments, "--tag", "v1.2.3"]) == 0
    assert f"the timm installed is {timm.__version__}" in capsys.readouterr().out
