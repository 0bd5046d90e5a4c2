"""Our gated attention unit and FLASH-pytorch's, with the same weights."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.modules.gated_attention_unit import GatedAttentionUnit

from ..harness.compare import MODEL_TOLERANCES, compare_attention
from ..harness.packages import missing
from ..harness.work import Absent, Candidate, Case, Comparison, Settings, attention_runs, random_inputs
from ..peers import attention_maps

GAU, FLASH = "GatedAttentionUnit", "FLASH-pytorch"
WIDTH, CHUNK = 512, 256
#: Tokens of the comparison with attention written out as a map: not a multiple of the chunk size.
_MAP = 700


def gated_attention_unit(settings: Settings, size: int) -> list[Candidate | Absent]:
    """Our unit and FLASH-pytorch's with the same weights: relu², no rotation, and a bias by distance that is zero."""
    torch.manual_seed(1)
    unit = GatedAttentionUnit(WIDTH, causal=True, chunk_size=CHUNK, rotary=False, bias="toeplitz")
    for parameter in (unit.gamma, unit.beta):
        nn.init.normal_(parameter)
    nn.init.normal_(unit.in_proj.weight, std=2.0 * WIDTH**-0.5)
    nn.init.normal_(unit.out_proj.weight, std=unit.expanded_dim**-0.5)
    nn.init.zeros_(unit.bias.weight)
    reason = missing("flash_pytorch")
    flash = Absent(FLASH, size, reason) if reason else _candidate(FLASH, _flash_pytorch(unit), settings, size)
    return [_candidate(GAU, unit, settings, size), flash]


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


def _candidate(name: str, unit: nn.Module, settings: Settings, size: int) -> Candidate:
    unit = settings.to(unit)
    (x,) = random_inputs(settings, (1, size, WIDTH))
    parameters = dict(unit.named_parameters())

    def check() -> list[Comparison]:
        (short,) = random_inputs(settings, (1, min(size, _MAP), WIDTH))
        return compare_attention(
            unit, partial(_written_out, unit), [short], ["x"], allowed=MODEL_TOLERANCES[settings.dtype]
        )

    def attention(x: Tensor, *_: Tensor) -> Tensor:  # the parameters are inputs as well, so that they get gradients
        return unit(x)

    return Candidate(name, size, size, attention_runs(attention, [x, *parameters.values()]), check)


def _written_out(unit: nn.Module, x: Tensor) -> Tensor:
    """Either unit in the dtype of x, with its attention as a map of all pairs of tokens: (1, n, d) -> (1, n, d)."""
    parameters = {name: parameter.detach().to(x) for name, parameter in unit.named_parameters()}
    normed = F.layer_norm(x, x.shape[-1:], parameters["norm.weight"], parameters["norm.bias"])
    if isinstance(unit, GatedAttentionUnit):
        hidden = F.silu(F.linear(normed, parameters["in_proj.weight"], parameters["in_proj.bias"]))
        gate, value, shared = hidden.split(unit.widths, dim=-1)
        heads = [shared * gamma + beta for gamma, beta in zip(parameters["gamma"][:, 0], parameters["beta"][:, 0])]
        out = (parameters["out_proj.weight"], parameters["out_proj.bias"])
    else:
        hidden = F.silu(F.linear(normed, parameters["to_hidden.0.weight"], parameters["to_hidden.0.bias"]))
        value, gate = hidden.chunk(2, dim=-1)
        shared = F.silu(F.linear(normed, parameters["to_qk.0.weight"], parameters["to_qk.0.bias"]))
        scales = zip(parameters["qk_offset_scale.gamma"], parameters["qk_offset_scale.beta"])
        heads = [shared * gamma + beta for gamma, beta in scales]
        heads = [heads[i] for i in (0, 2, 1, 3)]
        out = (parameters["to_out.weight"], parameters["to_out.bias"])
    attended = attention_maps.mixed_chunk_attention(*heads, value, chunk_size=CHUNK, bias=None)
    return x + F.linear(gate * attended, *out)


CASES = (
    Case(
        "flash_pytorch",
        "The gated attention unit with mixed chunk attention",
        "tokens",
        "tokens",
        (1024, 4096),
        (1024,),
        gated_attention_unit,
        plotted=False,
        note=f"B = 1, width {WIDTH}, chunks of {CHUNK}, causal; gradients of the parameters included",
    ),
)
