"""Importing the plugin: what it says when its surroundings are wrong, and what it leaves alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fairseq_plugin.helpers.commands import USER_DIR, run_module
from tests.processes import CHECKOUT


def _import_plugin(tmp_path: Path, files: dict[str, str], code: str = "import fairseq_plugin") -> str:
    """Run ``code`` in a new process whose first import folder holds ``files``; its output, whatever it exits with."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)])}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("files", "cause", "cure"),
    [
        (
            {"fairseq/__init__.py": "raise ModuleNotFoundError(\"No module named 'fairseq'\", name='fairseq')"},
            "fairseq, which is not installed",
            "pip install '.[fairseq]'",
        ),
        (
            {"fairseq/__init__.py": "raise ModuleNotFoundError(\"No module named 'hydra'\", name='hydra')"},
            "No module named 'hydra'",
            "pip install '.[fairseq]'",
        ),
        (
            {"fairseq/__init__.py": "raise ValueError('mutable default CommonConfig: use default_factory')"},
            "mutable default CommonConfig",
            "pip uninstall fairseq",
        ),
        ({"numpy.py": "__version__ = '2.1.0'"}, "numpy 2.1.0", "pip install 'numpy<2'"),
        ({"common/__init__.py": "", "common/ops.py": ""}, "another one in", "export PYTHONPATH="),
    ],
    ids=["missing", "requirement-missing", "too-old", "numpy-2", "foreign-common"],
)
def test_one_import_error_names_cause_and_cure(tmp_path: Path, files: dict[str, str], cause: str, cure: str) -> None:
    """The last line of the traceback is all a user needs."""
    output = _import_plugin(tmp_path, files)
    last = output.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and cause in last and cure in last, output


def test_without_the_other_host_and_named_again_as_user_dir(tmp_path: Path) -> None:
    """Neither timm nor torchvision is imported, and ``from_pretrained(user_dir=...)`` names the imported plugin."""
    blocked = {f"{name}/__init__.py": f"raise ImportError('{name} was imported')" for name in ("timm", "torchvision")}
    code = (
        "import argparse, fairseq_plugin; print('IMPORTED', *fairseq_plugin.__all__)\n"
        "from fairseq.utils import import_user_module\n"
        f"for _ in range(2): import_user_module(argparse.Namespace(user_dir={USER_DIR!r}))\n"
        "from fairseq.models import ARCH_MODEL_REGISTRY; print('ARCH', 'flowformer_lm' in ARCH_MODEL_REGISTRY)"
    )
    output = _import_plugin(tmp_path, blocked, code)
    assert "IMPORTED" in output and "FlowformerLanguageModel" in output and "ARCH True" in output, output


def test_module_prints_its_folder() -> None:
    """``--user-dir $(python -m fairseq_plugin)`` works from anywhere: the folder is the last line."""
    assert run_module("fairseq_plugin", [], cwd=str(CHECKOUT)).strip().splitlines()[-1] == USER_DIR
