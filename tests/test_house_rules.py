"""The rules of .pre-commit-config.yaml that need no tool of their own hold on the whole tree, and versions agree."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
PATTERNS = [hook for hook in HOOKS if hook["language"] == "pygrep"]
FOLDERS = ("common", "fairseq_plugin", "timm_plugin", "recipes", "tests")


@pytest.mark.parametrize("hook", PATTERNS, ids=lambda hook: hook["id"])
def test_no_line_of_the_tree_breaks_a_house_rule(hook):
    """What ``pre-commit run --all-files`` does, for the hooks that forbid a pattern."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    checked = [path for path in paths if re.search(hook.get("files", ""), str(path.relative_to(ROOT)))]
    assert len(checked) > 50
    broken = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in checked
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(hook["entry"], line)
    ]
    assert not broken, hook["name"] + "\n" + "\n".join(broken)


def test_every_house_rule_recognises_what_it_forbids():
    """A pattern that matches nothing would pass on any tree."""
    forbidden = {
        "module-docstrings-name-their-thing": ['"""What is here."""'],
        "the-core-knows-no-host": ["import timm", "    from fairseq.models import x", "import timm_plugin.layers"],
    }
    allowed = {
        "module-docstrings-name-their-thing": ['"""Whatever the host asks."""', '    """What a test shows."""'],
        "the-core-knows-no-host": ["import timeit", "from .timm_like import x", "# import timm"],
    }
    assert set(forbidden) == {hook["id"] for hook in PATTERNS}
    for hook in PATTERNS:
        assert all(re.search(hook["entry"], line) for line in forbidden[hook["id"]])
        assert not any(re.search(hook["entry"], line) for line in allowed[hook["id"]])


def test_pre_commit_and_setup_cfg_name_the_same_ruff():
    """The formatter's output changes between versions of ruff."""
    (installed,) = re.findall(r"^    (ruff==\S+)$", (ROOT / "setup.cfg").read_text(), flags=re.MULTILINE)
    named = [name for hook in HOOKS for name in hook.get("additional_dependencies", []) if name.startswith("ruff")]
    assert set(named) == {installed}
