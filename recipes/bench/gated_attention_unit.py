"""Our gated attention unit and FLASH-pytorch's, with the same weights."""

import copy
from importlib.util import find_spec

import torch
from torch import nn

from common.modules.gated_attention_unit import GatedAttentionUnit

from .measure import Candidate, Case, Place, random, runs_of
from .models import attention_written_out, training_errors

FLASH, WIDTH, CHUNK = "FLASH-pytorch", 512, 256


def units(size: int, place: Place) -> list[Candidate]:
    """Our unit and FLASH-pytorch's with the same weights: relu², no rotation, and a bias by distance that is zero."""
    torch.manual_seed(1)
    unit = GatedAttentionUnit(WIDTH, causal=True, chunk_size=CHUNK, rotary=False, bias="toeplitz")
    for parameter in (unit.gamma, unit.beta):
        nn.init.normal_(parameter)
    nn.init.normal_(unit.in_proj.weight, std=2.0 * WIDTH**-0.5)
    nn.init.normal_(unit.out_proj.weight, std=unit.expanded_dim**-0.5)
    nn.init.zeros_(unit.bias.weight)
    ours = _candidate("GatedAttentionUnit", unit, unit, size, place)
    if find_spec("flash_pytorch") is None:
        return [ours, Candidate(FLASH, absent="not installed: pip install '.[bench]'")]
    return [ours, _candidate(FLASH, _flash_pytorch(unit), unit, size, place)]


def _flash_pytorch(unit: GatedAttentionUnit) -> nn.Module:
    """FLASH-pytorch's unit with the weights of ``unit``."""
    import flash_pytorch

    flash = flash_pytorch.FLASH(dim=WIDTH, group_size=CHUNK, query_key_dim=unit.query_dim, causal=True)
    gate, value, shared = unit.in_proj.weight.split(unit.widths)
    gate_bias, value_bias, shared_bias = unit.in_proj.bias.split(unit.widths)
    order = torch.tensor([0, 2, 1, 3])  # theirs: quadratic query, linear query, quadratic key, linear key
    weights = {
        "norm.weight": unit.norm.weight,
        "norm.bias": unit.norm.bias,
        "rel_pos_bias.relative_attention_bias.weight": torch.zeros(32, 1),
        "to_hidden.0.weight": torch.cat([value, gate]),
        "to_hidden.0.bias": torch.cat([value_bias, gate_bias]),
        "to_qk.0.weight": shared,
        "to_qk.0.bias": shared_bias,
        "qk_offset_scale.gamma": unit.gamma[order, 0],
        "qk_offset_scale.beta": unit.beta[order, 0],
        "to_out.weight": unit.out_proj.weight,
        "to_out.bias": unit.out_proj.bias,
    }
    flash.load_state_dict({name: x.detach().clone() for name, x in weights.items()})
    return flash


def _candidate(name: str, unit: nn.Module, ours: nn.Module, size: int, place: Place) -> Candidate:
    unit, double = place(unit), place(copy.deepcopy(ours)).double()
    (x,) = random(place, (1, size, WIDTH))
    (short,) = random(place, (1, min(size, 700), WIDTH))  # not a multiple of the chunk size

    def check() -> dict[str, float]:
        exact = short.detach().double().requires_grad_()
        loss, literal = lambda: unit(short).square().mean(), lambda: double(exact).square().mean()
        return training_errors(loss, [short], literal, [exact], attention_written_out())

    # Parameters are inputs of the timed runs, so that they get gradients.
    runs = runs_of(lambda x, *_: unit(x), [x, *unit.parameters()])
    return Candidate(name, size, runs, check, is_model=True)


CASES = {
    "flash_pytorch": Case(f"The gated attention unit, width {WIDTH}, chunks of {CHUNK}", (1024, 4096), units, FLASH)
}
