"""No option that does nothing: what tasks, criteria and optimizers declare is read, and what a model has is printed."""

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields

import pytest
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

from fairseq_plugin.__main__ import main, options_of
from fairseq_plugin.loading.known_options import declared_options

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


def _functions(cls: type) -> Iterator[object]:
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


def _names(source: str) -> set[str]:
    """The attributes that ``source`` reads, its texts, as getattr takes them, and its arguments."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _module_names(cls: type) -> set[str]:
    """What the functions of our own modules read that are no methods, and their constants."""
    modules = {inspect.getmodule(parent) for parent in cls.__mro__ if parent.__module__.startswith("fairseq_plugin.")}
    bodies = [node for module in modules for node in ast.parse(inspect.getsource(module)).body]
    return {name for node in bodies if not isinstance(node, ast.ClassDef) for name in _names(ast.unparse(node))}


def _interpolated(kind: str) -> set[str]:
    """Options of tasks or criteria that models and tasks take from there: ``II("task.NAME")``."""
    configs = [*MODEL_DATACLASS_REGISTRY.values(), *TASK_DATACLASS_REGISTRY.values()]
    defaults = [field.default for config in configs for field in fields(config)]
    start = f"${{{kind}."
    return {x.removeprefix(start).removesuffix("}") for x in defaults if isinstance(x, str) and x.startswith(start)}


def unread(kind: str, registered: type, config: type) -> set[str]:
    """The options of ``config`` that nothing reads; those that stand for another group's are not its own."""
    own = {field.name for field in fields(config) if not str(field.default).startswith("${")} - {"_name"}
    read = {name for function in _functions(registered) for name in _names(inspect.getsource(function))}
    return own - read - _module_names(registered) - _interpolated(kind)


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


def test_the_options_of_every_architecture_are_printed() -> None:
    """By ``python -m fairseq_plugin --options ARCH``."""
    for architecture, model in ARCH_MODEL_REGISTRY.items():
        printed = options_of(architecture).format_help()
        for option in declared_options(model).values():
            shown = any(flag in printed for flag in option.option_strings)
            assert shown or option.help == argparse.SUPPRESS, (architecture, option.dest)


@pytest.mark.parametrize(("architecture", "width"), [("flash_lm_base", "768"), ("flash_lm", "512")])
def test_a_default_is_that_of_the_named_size(architecture: str, width: str, capsys: pytest.CaptureFixture) -> None:
    main(["--options", architecture])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--decoder-embed-dim DECODER_EMBED_DIM .*?\(default: (\d+)\)", printed)[1] == width
