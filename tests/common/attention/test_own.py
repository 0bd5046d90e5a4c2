"""Mechanisms of a user's own: what is declared wrongly, and what does not do what it claims, is one line."""

import re

import pytest
import torch

from common.attention import ATTENTIONS, import_own, register_attention
from tests.processes import CHECKOUT, run_program

#: Files by name, and what the message about each says; a module that Python does not find, and no file.
WRONG_FILES = {
    "broken.py": ("x = undefined", "NameError.*allowed"),
    "syntax.py": ("def", "SyntaxError.*allowed"),
    "json.py": ("", "json is the name of .*allowed: another file name"),
    "taken.py": (
        "from common.attention import register_attention as r\n@r('flow')\ndef f(v): return v",
        "flow.*new name",
    ),
    "missing.py": (None, "FileNotFoundError.*allowed"),
    "no_such_module": (None, "No module named.*allowed"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_file_that_cannot_be_imported_is_named(name, tmp_path):
    content, told = WRONG_FILES[name]
    path = tmp_path / name if name.endswith(".py") else name
    if content is not None:
        path.write_text(content)
    known = set(ATTENTIONS)
    with pytest.raises(ValueError, match=f"^LINEARTIME_MECHANISMS is {path}.*{told}") as caught:
        import_own(str(path))
    assert "\n" not in str(caught.value) and set(ATTENTIONS) == known


WRONG_FUNCTIONS = {
    "only queries": (lambda q: q, {}, "q.*allowed.*v"),
    "wrong order": (lambda v, k: v, {}, "v, k.*allowed"),
    "no default": (lambda v, size: v, {}, "'size'.*allowed"),
    "a host's word": (lambda v, num_heads=3: v, {}, "'num_heads'.*allowed"),
    "a list": (lambda v, sizes=(1,): v, {}, "sizes=.*allowed"),
    "free text": (lambda v, mode="mean": v, {}, "mode='mean'.*allowed.*Literal"),
    "a name": (lambda v: v, {"name": "My idea"}, "name is 'My idea'.*allowed"),
    "cross": (lambda v, causal: v, {"supports": {"cross"}}, "supports.*cross.*allowed"),
    "a parameter": (lambda v: v, {"parameters": lambda h, d: {"rate": torch.ones(h)}}, "'rate'.*allowed"),
}


@pytest.mark.parametrize("label", WRONG_FUNCTIONS)
def test_a_declaration_that_means_nothing_is_refused(label):
    function, given, told = WRONG_FUNCTIONS[label]
    options = {"name": "refused", **given}
    with pytest.raises(ValueError, match=told) as caught:
        register_attention(options.pop("name"), **options)(function)
    assert "\n" not in str(caught.value) and "refused" not in ATTENTIONS


#: Functions that are registered as causal attention, and what the message about each says.
CLAIMS = """
from typing import Literal

import torch

from common.attention import ATTENTIONS, build_attention, register_attention

claims = {
    "another_shape": (lambda v, *, causal: v.sum(2)),
    "no_tensor": (lambda v, *, causal: None),
    "an_error": (lambda q, k, v, *, causal: q @ k),
    "looks_ahead": (lambda v, *, causal: v.mean(2, keepdim=True).expand_as(v)),
    "depends_on_length": (lambda v: v / v.shape[2]),
}
for name, function in claims.items():
    try:
        register_attention(name, supports={"causal"})(function)
    except ValueError as error:
        print(error)
    assert name not in ATTENTIONS


@register_attention("chosen")
def chosen(v, *, causal, power: Literal["one", "two"] = "one", scale=-1.5, shift=0, sign=False):
    return v * scale + shift if power == "one" else v**2


module = build_attention("chosen", True, power="two", scale=0, shift=-3, sign=True)
assert module.options.as_dict() == {"power": "two", "scale": 0.0, "shift": -3, "sign": True}
v = torch.randn(1, 2, 5, 4)
assert torch.equal(module(None, None, v), v**2)
for options in ({"power": "three"}, {"scale": "x"}, {"shift": 0.5}, {"sign": 1}):
    try:
        build_attention("chosen", True, **options)
    except ValueError as error:
        print(error)
"""
TOLD = (
    *(
        "another_shape.*shape",
        "no_tensor.*NoneType.*allowed",
        "an_error.*7 or 4 tokens in line .*claims.py: RuntimeError",
    ),
    *("causal is True.*looks_ahead.*allowed", "causal is True.*depends_on_length.*allowed"),
    *("power.*'three'.*allowed", "scale.*'x'.*allowed", "shift.*0.5.*allowed", "sign.*1.*allowed"),
)


def test_a_function_is_tried_when_it_is_registered_and_options_are_when_it_is_built(tmp_path):
    """In a process of its own, since hosts would make models of what is registered here."""
    (tmp_path / "claims.py").write_text(f"import sys\nsys.path.insert(0, {str(CHECKOUT)!r})\n{CLAIMS}")
    printed = run_program([str(tmp_path / "claims.py")])
    lines = printed.splitlines()
    assert len(lines) == len(TOLD), printed
    for line, told in zip(lines, TOLD):
        assert re.search(told, line), f"{line} does not say {told}"
