"""The command that tries the packages: its environments are fresh, and it recognises what is wrong."""

import re

import pytest

from recipes.package.__main__ import PACKAGES, check_files
from recipes.package.environment import Environment, create_environment, run
from recipes.shared.scripts import RecipeFailed
from tests.processes import CHECKOUT


def test_a_fresh_environment_has_what_is_installed_except_this_project(tmp_path):
    """Nothing of the checkout can be imported there, whether it is installed or on the path of this process."""
    environment = create_environment(tmp_path / "environment")
    code = "from importlib.util import find_spec; print(*(name for name in {!r} if find_spec(name)))"
    names = (*PACKAGES, "recipes", "torch", "fairseq", "timm")
    assert run([environment.python, "-c", code.format(names)], tmp_path).split() == ["torch", "fairseq", "timm"]
    assert environment.packages.is_relative_to(tmp_path)
    assert not (environment.packages / "fairseq").is_symlink()  # plugins are looked for beside it


def test_a_command_that_fails_is_named_with_the_end_of_its_output(tmp_path):
    environment = Environment(create_environment(tmp_path / "environment").python, tmp_path)
    with pytest.raises(RecipeFailed, match=r"(?s)exit status 1.*no_such_module"):
        run([environment.python, "-c", "import no_such_module"], tmp_path)


@pytest.mark.parametrize("wrong", ["common/missing.json", "timm_plugin/models/more.py"])
def test_a_missing_file_and_one_more_are_named(wrong, tmp_path):
    expected = {f"{package}/__init__.py" for package in PACKAGES}
    for name in (*expected, "common/__pycache__/cached.pyc", *([wrong] if "more" in wrong else [])):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    environment = Environment(tmp_path / "python", tmp_path)
    with pytest.raises(RecipeFailed, match=re.escape(wrong)):
        check_files(environment, expected | ({wrong} if "missing" in wrong else set()))
    assert check_files(environment, expected | ({wrong} if "more" in wrong else set())) is None


def test_continuous_integration_builds_the_site_and_the_packages():
    steps = (CHECKOUT / ".ci" / "run").read_text().splitlines()
    assert {"make docs", "make package"} <= set(steps)
