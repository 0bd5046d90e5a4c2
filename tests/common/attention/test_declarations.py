"""A mechanism's declarations are true: its cost, the size of its state, and whether it is permutation-equivariant.

``test_record.py`` tests that outputs are weighted means, since it has the maps.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import mechanisms
from common.attention import ATTENTIONS, InnerAttention, build_attention, supporting
from common.ops.shared.cpu.operators import FORMULAS

names = pytest.mark.parametrize("name", ATTENTIONS)
FUNCTIONS = {"min": min, "log": math.log2}


def value(formula: str, **letters: int) -> float:
    """Evaluate a formula in mathematical notation, such as "2d min(n, w) + d²", with d, n and w."""
    for power, number in {"²": 2, "³": 3, "⁶": 6}.items():
        formula = formula.replace(power, f"**{number}")
    tokens, code = re.findall(r"\*\*|\d+|min|log|mod|[A-Za-z]|[-+/(),]", formula), ""
    for before, token in zip(["", *tokens], tokens):
        is_product = (before[-1:].isalnum() or before == ")") and (token[0].isalnum() or token == "(")
        code += "*" if is_product and before not in (*FUNCTIONS, "mod") and token != "mod" else ""
        code += "%" if token == "mod" else token
    return eval(code, {**FUNCTIONS, **letters})


def sizes(name: str, least: int = 9) -> dict[str, int]:
    """Small values, all different, for the letters in a mechanism's formulas."""
    return {letter: least * 3**i for i, letter in enumerate(reversed(ATTENTIONS[name].about.sizes))}


def build(name: str, causal: bool, n: int, d: int, least: int = 9, **options: int) -> InnerAttention:
    """Build a mechanism with one head and options that match its ``sizes``; for an image if it only accepts images."""
    kind = ATTENTIONS[name]
    chosen = {kind.about.sizes[letter]: x for letter, x in sizes(name, least).items()} | options
    dims = 2 if "spatial_shape" in kind.needs else 1
    return build_attention(name, causal, num_heads=1, head_dim=d, max_tokens=n, spatial_dims=dims, **chosen).eval()


def inputs(attention: InnerAttention, n: int, d: int) -> dict[str, Any]:
    """Tensors for n tokens, and the height and width of an image."""
    widths = attention.projections(d)
    projected = {x: torch.randn(1, 1, n, widths[x]) if x in widths else None for x in ("q", "k", "v")}
    further = {"x": torch.randn(1, n, d), "source_q": torch.randn(1, 1, n, d)}
    return {**projected, **attention.inputs(**further, spatial_shape=(16, n // 16))}


@names
def test_every_mechanism_says_what_it_is(name: str):
    """The letters in a formula are n, d and those of existing options."""
    kind = ATTENTIONS[name]
    assert set(kind.about.sizes.values()) <= kind.Options.described().keys()
    assert kind.about.title and kind.about.paper and bool(kind.about.state) == ("causal" in kind.supports)
    value(f"{kind.about.cost} + {kind.about.state or 0}", n=64, d=4, **sizes(name))


@pytest.mark.parametrize("name", supporting("causal"))
@torch.no_grad()
def test_a_state_is_as_large_as_its_formula_says(name: str):
    """Sizes count float32 numbers. A state also holds counts, and one byte per token for padding."""
    for n in (99, 198):
        attention = build(name, True, n, 16, least=18)
        _, state = attention.extend(**inputs(attention, n, 16))
        numbers = sum(x.nbytes for x in state.values()) / 4
        assert numbers == pytest.approx(value(ATTENTIONS[name].about.state, n=n, d=16, **sizes(name, 18)), rel=0.02)


@names
@torch.no_grad()
def test_a_cost_grows_as_its_formula_says(name: str):
    """Cost counts multiplications in products, also of kernels, from 512 to 1,024 tokens; chunked sums grow faster."""
    kind, counted, declared = ATTENTIONS[name], [], []
    least, options = (4, {"iterations": 1}) if name == "soft" else (9, {})  # rows and columns divide by its ratio
    for n in (512, 1024):
        attention = build(name, not {"bidirectional", "source"} & kind.supports, n, 8, least, **options)
        arguments = inputs(attention, n, 8)
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter, sdpa_kernel(SDPBackend.MATH):
            attention(**arguments)
        counted.append(counter.get_total_flops())
        declared.append(value(kind.about.cost, n=n, d=8, **sizes(name, least)))
    assert counted[1] / counted[0] == pytest.approx(declared[1] / declared[0], rel=0.15)
    assert kind.linear_cost == (declared[1] / declared[0] < 2.3)


@pytest.mark.parametrize("name", {**dict.fromkeys(supporting("bidirectional", images=True)), "flow_source": None})
@torch.no_grad()
def test_permutation_equivariant_says_whether_tokens_are_a_set(name: str):
    """Windows are shorter than the sequence, so that order matters; a Reformer chunk is as long as the sequence."""
    n, options = 512, {"chunk_size": 512, "rounds": 2} if name == "reformer" else {}
    attention = build(name, False, n, 8, **options).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    arguments = {x: y.double() if isinstance(y, Tensor) else y for x, y in inputs(attention, n, 8).items()}
    order = torch.randperm(n)
    dims = {"q": 2, "k": 2, "v": 2, "x": 1, "source_q": 2}
    moved = {x: y.index_select(dims[x], order) if isinstance(y, Tensor) else y for x, y in arguments.items()}
    out, permuted = attention(**arguments)[:, :, order], attention(**moved)
    assert ((out - permuted).norm() <= 1e-9 * out.norm()) == ATTENTIONS[name].permutation_equivariant


#: Mechanism -> option -> (default, allowed names, whether it changes a result).
STORED = Path(__file__).parents[2] / "golden" / "attention_options.json"


def test_options_that_users_type_keep_their_names_defaults_and_choices():
    """Update the stored file and CHANGELOG.md for a change on purpose."""
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(ATTENTIONS)
    for name, kind in ATTENTIONS.items():
        defaults, described = kind.Options.defaults(), kind.Options.described()
        assert stored[name] == {
            option: {
                "default": defaults[option],
                "choices": None if description.choices is None else list(description.choices),
                "speed_only": description.speed_only,
            }
            for option, description in described.items()
        }, name


@pytest.mark.parametrize("folder", ["common", "fairseq_plugin", "timm_plugin"])
def test_the_tables_of_a_readme_are_those_of_the_declarations(folder):
    """If this fails, run make tables."""
    paths = [path for path in mechanisms.readmes() if path.parent == mechanisms.ROOT / folder]
    assert paths and all(mechanisms.rewritten_readme(path) == path.read_text(encoding="utf-8") for path in paths)
