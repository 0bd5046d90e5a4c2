"""Other packages' attention: FLASH-pytorch's block and performer-pytorch's causal attention."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.gau import GatedAttentionUnit
from common.ops import linear_attention

from ..compare import MODEL_TOLERANCES, compare_attention
from ..packages import missing
from ..peers import attention_maps
from ..work import Absent, Case, Comparison, Form, Settings, attention_runs, random_inputs

GAU, FLASH = "GatedAttentionUnit", "FLASH-pytorch"
LINEAR, PERFORMER = "linear_attention", "performer-pytorch"
WIDTH, CHUNK, HEADS, HEAD_DIM = 512, 256, 8, 64
#: Tokens of the comparison of a block with one that is not in chunks: no whole number of them.
_MAP = 700


def gated_attention_unit(settings: Settings, size: int) -> list[Form | Absent]:
    """Our block and FLASH-pytorch's, with the same weights: relu², no rotation, a bias by distance that is zero."""
    torch.manual_seed(1)
    unit = GatedAttentionUnit(WIDTH, causal=True, chunk_size=CHUNK, rotary=False, bias="toeplitz")
    for parameter in (unit.gamma, unit.beta):
        nn.init.normal_(parameter)
    nn.init.normal_(unit.in_proj.weight, std=2.0 * WIDTH**-0.5)
    nn.init.normal_(unit.out_proj.weight, std=unit.expanded_dim**-0.5)
    nn.init.zeros_(unit.bias.weight)
    blocks: dict[str, nn.Module] = {GAU: unit}
    reason = missing("flash_pytorch")
    if reason is None:
        blocks[FLASH] = _flash_pytorch(unit)
    forms = [_block(name, settings.to(block), settings, size) for name, block in blocks.items()]
    return forms if reason is None else [*forms, Absent(FLASH, size, reason)]


def _flash_pytorch(unit: GatedAttentionUnit) -> nn.Module:
    """FLASH-pytorch's block with the weights of ``unit``."""
    import flash_pytorch

    block = flash_pytorch.FLASH(dim=WIDTH, group_size=CHUNK, query_key_dim=unit.query_dim, causal=True)
    gate, value, shared = unit.in_proj.weight.split(unit.widths)
    gate_bias, value_bias, shared_bias = unit.in_proj.bias.split(unit.widths)
    order = torch.tensor([0, 2, 1, 3])  # theirs: quadratic query, linear query, quadratic key, linear key
    given = {
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
    block.load_state_dict({name: x.detach().clone() for name, x in given.items()})
    return block


def _block(name: str, block: nn.Module, settings: Settings, size: int) -> Form:
    (x,) = random_inputs(settings, (1, size, WIDTH))
    parameters = dict(block.named_parameters())

    def check() -> list[Comparison]:
        (short,) = random_inputs(settings, (1, min(size, _MAP), WIDTH))
        return compare_attention(
            block, partial(_written_out, block), [short], ["x"], allowed=MODEL_TOLERANCES[settings.dtype]
        )

    def attention(x: Tensor, *_: Tensor) -> Tensor:  # the parameters are inputs too: they want gradients
        return block(x)

    return Form(name, size, size, attention_runs(attention, [x, *parameters.values()]), check)


def _written_out(block: nn.Module, x: Tensor) -> Tensor:
    """Either block in x's dtype, its attention as a map of every two tokens: (1, n, d) -> (1, n, d)."""
    p = {name: parameter.detach().to(x) for name, parameter in block.named_parameters()}
    normed = F.layer_norm(x, x.shape[-1:], p["norm.weight"], p["norm.bias"])
    if isinstance(block, GatedAttentionUnit):
        hidden = F.silu(F.linear(normed, p["in_proj.weight"], p["in_proj.bias"]))
        gate, value, shared = hidden.split(block.widths, dim=-1)
        heads = [shared * gamma + beta for gamma, beta in zip(p["gamma"][:, 0], p["beta"][:, 0])]
        out = (p["out_proj.weight"], p["out_proj.bias"])
    else:
        hidden = F.silu(F.linear(normed, p["to_hidden.0.weight"], p["to_hidden.0.bias"]))
        value, gate = hidden.chunk(2, dim=-1)
        shared = F.silu(F.linear(normed, p["to_qk.0.weight"], p["to_qk.0.bias"]))
        scales = zip(p["qk_offset_scale.gamma"], p["qk_offset_scale.beta"])
        heads = [shared * gamma + beta for gamma, beta in scales]
        heads = [heads[i] for i in (0, 2, 1, 3)]
        out = (p["to_out.weight"], p["to_out.bias"])
    attended = attention_maps.mixed_chunk_attention(*heads, value, chunk_size=CHUNK, bias=None)
    return x + F.linear(gate * attended, *out)


def performer(settings: Settings, size: int) -> list[Form | Absent]:
    """Causal attention with relu features, ours and performer-pytorch's."""
    ours = partial(linear_attention, causal=True, phi="relu")
    forms: list[Form | Absent] = [_attention(LINEAR, ours, settings, size)]
    reason = missing("performer_pytorch")
    if reason is not None:
        return [*forms, Absent(PERFORMER, size, reason)]
    return [*forms, _attention(PERFORMER, _performer_pytorch().to(settings.device), settings, size)]


def _performer_pytorch() -> nn.Module:
    """performer-pytorch's attention with relu features of the channels themselves, as in the FLASH paper's baseline."""
    import performer_pytorch

    scale = HEAD_DIM**-0.25  # it multiplies q and k by this; a factor of all features cancels

    def relu(x: Tensor) -> Tensor:
        return F.relu(x) + (1e-6 * scale - 1e-3)  # it adds 1e-3 itself

    with redirect_stdout(io.StringIO()):  # it prints that a kernel of another package is not there
        attention = performer_pytorch.FastAttention(
            HEAD_DIM, nb_features=HEAD_DIM, causal=True, generalized_attention=True, kernel_fn=relu
        )
    attention.projection_matrix = None
    return attention


def _attention(name: str, attention: Callable[..., Tensor], settings: Settings, size: int) -> Form:
    inputs = random_inputs(settings, *[(1, HEADS, size, HEAD_DIM)] * 3)

    def check() -> list[Comparison]:
        short = random_inputs(settings, *[(1, HEADS, min(size, _MAP), HEAD_DIM)] * 3)
        return compare_attention(attention, attention_maps.relu_attention, short, ("q", "k", "v"), heads=1)

    nbytes = sum(x.numel() * x.element_size() for x in inputs)
    return Form(name, size, size, attention_runs(attention, inputs), check, nbytes)


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
    Case(
        "performer_pytorch",
        "Performer attention, causal",
        "tokens",
        "tokens",
        (1024, 4096),
        (1024,),
        performer,
        plotted=False,
        note=f"B = 1, H = {HEADS}, d = {HEAD_DIM}, relu features without random projections",
    ),
)
