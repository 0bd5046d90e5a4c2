"""The plugin as a whole: what importing it says and leaves alone, and no option that does nothing or is not printed."""

import argparse
import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

from fairseq_plugin.__main__ import main, options_of
from fairseq_plugin.loading.known_options import declared_options
from tests.fairseq_plugin.helpers.commands import USER_DIR
from tests.golden.make_fairseq import FOLDER
from tests.processes import CHECKOUT

# ---- Importing


def run(tmp_path: Path, files: dict[str, str], code: str = "import fairseq_plugin") -> str:
    """Run ``code`` in a new process whose first import folder holds ``files``; its output, whatever it exits with."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)])}
    command = [sys.executable, "-W", "ignore", "-c", code]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("file", "text", "cause", "cure"),
    [
        ("fairseq/__init__", "raise ModuleNotFoundError(name='fairseq')", "not installed", "pip install '.[fairseq]'"),
        ("fairseq/__init__", "raise ModuleNotFoundError('hydra', name='hydra')", "hydra", "pip install '.[fairseq]'"),
        ("fairseq/__init__", "raise ValueError('mutable default')", "mutable default", "pip uninstall fairseq"),
        ("numpy", "__version__ = '2.1.0'", "numpy 2.1.0", "pip install 'numpy<2'"),
        ("common/__init__", "", "another one in", "export PYTHONPATH="),
    ],
    ids=["missing", "requirement-missing", "too-old", "numpy-2", "foreign-common"],
)
def test_one_import_error_names_cause_and_cure(tmp_path: Path, file: str, text: str, cause: str, cure: str) -> None:
    """The last line of the traceback is all a user needs."""
    output = run(tmp_path, {f"{file}.py": text})
    last = output.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and cause in last and cure in last, output


def test_a_new_process_loads_a_checkpoint(tmp_path: Path) -> None:
    """From another folder, with the plugin alone, named again as ``user_dir``; its tensors were on a GPU."""
    blocked = {f"{name}/__init__.py": f"raise ImportError('{name} was imported')" for name in ("timm", "torchvision")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        torch.save(torch.load(FOLDER / "flowformer_lm.pt"), tmp_path / "c.pt")
    assert b"cuda:7" in (tmp_path / "c.pt").read_bytes()
    code = f"""import argparse, torch, fairseq_plugin
from fairseq.utils import import_user_module
for _ in range(2): import_user_module(argparse.Namespace(user_dir={USER_DIR!r}))
hub = fairseq_plugin.FlowformerLanguageModel.from_pretrained({str(tmp_path)!r}, "c.pt", {str(FOLDER)!r})
golden = torch.load({str(FOLDER / "flowformer_lm.pt")!r})["golden"]
print("EQUAL", torch.allclose(hub.models[0](golden["tokens"])[0], golden["logits"], atol=1e-4))"""
    output = run(tmp_path, blocked, code)
    assert "EQUAL True" in output, output


# ---- Options

REGISTRIES = {
    "task": (TASK_REGISTRY, TASK_DATACLASS_REGISTRY),
    "criterion": (CRITERION_REGISTRY, CRITERION_DATACLASS_REGISTRY),
    "optimizer": (OPTIMIZER_REGISTRY, OPTIMIZER_DATACLASS_REGISTRY),
}
OURS = [
    (kind, name)
    for kind, (registry, configs) in REGISTRIES.items()
    for name, registered in registry.items()
    if registered.__module__.startswith("fairseq_plugin.") and name in configs
]


def functions_of(cls: type) -> Iterator[object]:
    """The functions that run for ``cls``: of each name the first, and those after it that it calls by ``super()``."""
    for name in {name for parent in cls.__mro__ for name in vars(parent)}:
        for parent in cls.__mro__:
            found = vars(parent).get(name)
            found = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", found)
            if not inspect.isfunction(found):
                continue
            yield found
            if f"super().{name}" not in inspect.getsource(found):
                break


def names_in(source: str) -> set[str]:
    """The attributes that ``source`` reads, its texts, as getattr takes them, and its arguments."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | {node.arg for node in nodes if isinstance(node, ast.arg)}


def unread(kind: str, registered: type, config: type) -> set[str]:
    """The options of ``config`` that nothing reads; those that stand for another group's are not its own.

    Functions of our modules may read them, and models and tasks take them from there: ``II("task.NAME")``.
    """
    own = {field.name for field in fields(config) if not str(field.default).startswith("${")} - {"_name"}
    read = {name for function in functions_of(registered) for name in names_in(inspect.getsource(function))}
    parents = [x for x in registered.__mro__ if x.__module__.startswith("fairseq_plugin.")]
    for module in {inspect.getmodule(parent) for parent in parents}:
        bodies = [x for x in ast.parse(inspect.getsource(module)).body if not isinstance(x, ast.ClassDef)]
        read |= {name for body in bodies for name in names_in(ast.unparse(body))}
    configs = [*MODEL_DATACLASS_REGISTRY.values(), *TASK_DATACLASS_REGISTRY.values()]
    taken = {str(field.default) for config in configs for field in fields(config)}
    return {name for name in own - read if f"${{{kind}.{name}}}" not in taken}


@pytest.mark.parametrize("kind, name", OURS)
def test_every_option_is_read(kind: str, name: str) -> None:
    """By the class or by what it calls of its parents; an option that only an overridden parent reads is unread."""
    registry, configs = REGISTRIES[kind]
    assert not unread(kind, registry[name], configs[name])


def test_an_option_that_nothing_reads_is_found() -> None:
    """fairseq's options of joined sentences, of which the pairs' task overrides the only reader."""
    joined = TASK_DATACLASS_REGISTRY["sentence_prediction"]
    found = unread("task", TASK_REGISTRY["sequence_pair_prediction"], joined)
    assert found == {"add_prev_output_tokens", "d2v2_multi", "separator_token"} and len(OURS) >= 7


def test_the_options_of_every_model_are_printed(capsys: pytest.CaptureFixture) -> None:
    """By ``python -m fairseq_plugin --options ARCH``, with the default of a named size; alone it prints its folder."""
    for name, model in MODEL_REGISTRY.items():
        printed = options_of(name).format_help() if model.__module__.startswith("fairseq_plugin.") else ""
        for option in declared_options(model).values() if printed else ():
            shown = any(flag in printed for flag in option.option_strings)
            assert shown or option.help == argparse.SUPPRESS, (name, option.dest)
    for arch, width in (("flash_lm_base", "768"), ("flash_lm", "512")):
        main(["--options", arch])
        printed = " ".join(capsys.readouterr().out.split())
        assert re.search(r"--decoder-embed-dim DECODER_EMBED_DIM .*?\(default: (\d+)\)", printed)[1] == width
    main([])
    assert capsys.readouterr().out.strip() == USER_DIR
