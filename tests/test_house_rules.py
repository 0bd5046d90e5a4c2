"""The rules in .pre-commit-config.yaml and CONTRIBUTING.md that need no tool hold for the tree; versions agree."""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
PATTERNS = [hook for hook in HOOKS if hook["language"] == "pygrep"]
FOLDERS = ("common", "fairseq_plugin", "timm_plugin", "recipes", "tests")

#: Functions that take an attribute name as a string.
PATCHES = ("getattr", "setattr", "delattr", "patch", "object")
#: Private by name only: fairseq's name for the choice in a configuration group.
NAMES_OF_HOSTS = {"_name"}


@pytest.mark.parametrize("hook", PATTERNS, ids=lambda hook: hook["id"])
def test_no_line_of_the_tree_breaks_a_house_rule(hook):
    """Equivalent to ``pre-commit run --all-files`` for the hooks that forbid a pattern."""
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


def test_pre_commit_and_setup_cfg_name_the_same_ruff():
    """The formatter's output depends on the version of ruff. A source archive's setup.cfg is indented by tabs."""
    (installed,) = re.findall(r"^[ \t]+(ruff==\S+)$", (ROOT / "setup.cfg").read_text(), flags=re.MULTILINE)
    named = [name for hook in HOOKS for name in hook.get("additional_dependencies", []) if name.startswith("ruff")]
    assert set(named) == {installed}


def private_names_of(tree: ast.AST) -> Iterator[str]:
    """Names with one leading underscore that a file defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        if name.startswith("_") and not name.endswith("_"):
            yield name


def names_used(node: ast.AST) -> list[str]:
    """Names that a piece of code uses from elsewhere: imported, after a dot, or as a string passed to setattr."""
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [node.attr] if ast.unparse(node.value) not in ("self", "cls") else []
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PATCHES:
        texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        return [str(text).rpartition(".")[2] for text in texts]
    return []


def broken_test_rules(code: str, private: Collection[str]) -> list[str]:
    """Lines of ``code`` that import a test file, or use one of the names in ``private``."""
    broken_lines = []
    for node in ast.walk(ast.parse(code)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(part.startswith("test_") for module in modules for part in module.split(".")):
            broken_lines.append(f"{node.lineno}: a test file is imported")
        broken_lines += [f"{node.lineno}: {name} is private" for name in names_used(node) if name in private]
    return broken_lines


def private_names_of_the_product() -> set[str]:
    """Private names of all folders except the tests, without ``NAMES_OF_HOSTS``."""
    paths = [path for folder in FOLDERS if folder != "tests" for path in (ROOT / folder).rglob("*.py")]
    return {name for path in paths for name in private_names_of(ast.parse(path.read_text()))} - NAMES_OF_HOSTS


def test_no_test_imports_a_test_or_uses_a_private_name():
    """A file whose name begins with an underscore may be imported: it is infrastructure with public names."""
    private = private_names_of_the_product()
    assert len(private) > 100
    broken = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in broken_test_rules(path.read_text(), private)
    ]
    assert not broken, "\n".join(broken)


def names_from(tree: ast.AST) -> dict[str, str]:
    """The names that a file imports, and the module that each comes from."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        alias.asname or alias.name: (getattr(node, "module", None) or alias.name)
        for node in imports
        for alias in node.names
    }


def is_apart(module: str) -> bool:
    """Whether a reference may import from ``module``: torch, the standard library, other references and their tools."""
    outside = module.split(".")[0] in {"torch", *sys.stdlib_module_names}
    return outside or module.rpartition(".")[2] == "reference_tools" or module.endswith("reference")


#: Methods of modules that compute the literal form, or a part of it.
LITERAL = ("reference", "apply_reference", "reference_kwargs")


def shared_by_reference(code: str) -> list[str]:
    """Names from elsewhere used in the ``LITERAL`` methods of ``code`` and in methods of the class that they call."""
    tree = ast.parse(code)
    imported, names_found = names_from(tree), []
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
        waiting, seen = [name for name in LITERAL if name in methods], set()
        while waiting:
            seen.add(name := waiting.pop())
            for node in (part for statement in methods[name].body for part in ast.walk(statement)):
                if isinstance(node, ast.Name) and not is_apart(imported.get(node.id, "torch")):
                    names_found.append(f"{kind.name}.{name}: {node.id}")
                own = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in methods
                if own and node.attr not in seen:
                    waiting.append(node.attr)
    return names_found


def test_a_reference_shares_no_code_with_what_it_checks():
    """Shared code would share its mistakes."""
    ops = ROOT / "common" / "ops"
    references = [*ops.glob("*/*reference.py"), ops / "shared" / "reference_tools.py"]
    assert len(references) > 20
    broken = [
        f"{path.relative_to(ROOT)}: {name} of {module}"
        for path in references
        for name, module in names_from(ast.parse(path.read_text())).items()
        if not is_apart(module)
    ]
    files = [path for folder in ("attention", "modules") for path in (ROOT / "common" / folder).glob("*.py")]
    methods = [path for path in files if any(f"def {name}(" in path.read_text() for name in LITERAL)]
    assert len(methods) > 8
    broken += [f"{path.name}: {x}" for path in methods for x in shared_by_reference(path.read_text())]
    assert not broken, "\n".join(broken)


def unclear_docstrings(code: str) -> list[str]:
    """First words of the docstrings in ``code`` that do not state what the object is or does."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]
    return [text[:60] for text in docstrings if re.match(r"(The same|Those|Of|That|What|It|Them|Its)\b", text)]


def test_docstrings_begin_with_what_the_thing_is_or_does():
    """Applies to every file of the product."""
    paths = [path for folder in FOLDERS if folder != "tests" for path in (ROOT / folder).rglob("*.py")]
    broken = [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in unclear_docstrings(path.read_text())]
    assert not broken, "\n".join(broken)


def test_recipes_remove_and_replace_nothing():
    """Safe by construction: no command of a recipe removes, renames or moves a file or folder."""
    removing = r"\b(rmtree|unlink|rmdir|removedirs|renames)\(|\b(os\.(remove|rename|replace)|shutil\.move)\("
    rules = {"*.py": removing, "*.sh": r"^[^#\n]*?\b(?:rm|mv) "}
    paths = {ending: list((ROOT / "recipes").rglob(ending)) for ending in rules}
    assert len(paths["*.py"]) > 50 and paths["*.sh"]
    broken = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for ending, rule in rules.items()
        for path in paths[ending]
        for found in re.finditer(rule, path.read_text(), re.MULTILINE)
    ]
    assert not broken, "\n".join(broken)


REFERENCE = """
from ..ops.shared.padding import take
from .interface import EPS
from torch.nn import functional as F
class A:
  def reference(self, x): return {body}
  def _other(self): return take(self.x)
"""


@pytest.mark.parametrize(
    ("rule", "code", "count"),
    [
        *[
            (lambda code: broken_test_rules(code, {"_hidden"}), code, 1)
            for code in (
                "from tests.common.test_imports import USE",
                "from . import test_imports",
                "from common.ops.flow.causal import _hidden",
                "def test(): module._hidden()",
                "monkeypatch.setattr('common.ops.flow._hidden', None)",
                "with mock.patch.object(module, '_hidden'): pass",
            )
        ],
        (lambda code: broken_test_rules(code, {"_hidden"}), "self._hidden = 1; print('_hidden'); x._replace(a=1)", 0),
        *[
            (shared_by_reference, REFERENCE.format(body=body), count)
            for body, count in (("take(x)", 1), ("x + EPS", 1), ("self._other()", 1), ("F.relu(x)", 0))
        ],
        (unclear_docstrings, '"""What is here."""\ndef f():\n  """Return x."""\nclass A:\n  """The same."""', 2),
    ],
)
def test_the_rules_recognise_what_they_forbid(rule, code, count):
    """A rule that recognises nothing would hold for any tree."""
    assert len(rule(code)) == count
