"""The authors' language model as formulas on a state dict with their names, to compare ours with.

They trained fairseq's ``transformer_lm`` with Flowformer_NLP/flow_attention.py of thuml/Flowformer (MIT licence, Wu et
al.) in place of fairseq's multi-head attention: same parameter names, and here the same computation. Around it stands
fairseq's pre-norm or post-norm Transformer of sinusoidal positions and relu.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.bench.peers.released_attention import language_model as flow_attention

State = dict[str, Tensor]
PAD = 1


def released_shapes(
    symbols: int, dim: int, ffn_dim: int, layers: int, pre_norm: bool = True
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of their model, in the order fairseq's module of 2021 has them."""
    shapes: dict[str, tuple[int, ...]] = {"decoder.version": (1,), "decoder.embed_tokens.weight": (symbols, dim)}
    shapes["decoder.embed_positions._float_tensor"] = (1,)
    sizes = {"k_proj": (dim, dim), "v_proj": (dim, dim), "q_proj": (dim, dim), "out_proj": (dim, dim)}
    sizes = {f"self_attn.{name}": size for name, size in sizes.items()}
    sizes.update({"self_attn_layer_norm": (dim,), "fc1": (ffn_dim, dim), "fc2": (dim, ffn_dim)})
    sizes["final_layer_norm"] = (dim,)
    for layer in range(layers):
        for name, size in sizes.items():
            shapes[f"decoder.layers.{layer}.{name}.weight"] = size
            shapes[f"decoder.layers.{layer}.{name}.bias"] = size[:1]
    if pre_norm:
        shapes["decoder.layer_norm.weight"] = shapes["decoder.layer_norm.bias"] = (dim,)
    return {**shapes, "decoder.output_projection.weight": (symbols, dim)}


def released_weights(*sizes: int, pre_norm: bool = True, seed: int = 0) -> State:
    """Random weights under which attention shows in the logits, input and output embeddings shared as theirs are."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in released_shapes(*sizes, pre_norm=pre_norm).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            state[name] = 1 + 0.2 * noise
        elif len(shape) == 2:
            state[name] = noise * (2.0 if "_proj" in name else 1.0) * shape[1] ** -0.5
        else:
            state[name] = 0.2 * noise
    state["decoder.version"] = torch.tensor([3.0])
    state["decoder.embed_tokens.weight"][PAD] = 0.0
    state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    return state


def sinusoids(positions: int, dim: int) -> Tensor:
    """fairseq's table for positions 0, 1, ...: (positions, dim), sines then cosines, in float32."""
    steps = math.log(10000) / (dim // 2 - 1)
    angle = torch.arange(positions).float()[:, None] * torch.exp(torch.arange(dim // 2).float() * -steps)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def released_forward(tokens: Tensor, state: State, heads: int, layers: int, pre_norm: bool = True) -> Tensor:
    """Their model: tokens (B, T) without padding -> logits (B, T, V), in the dtype of the weights."""
    embedding = state["decoder.embed_tokens.weight"]
    dim = embedding.shape[1]
    first = PAD + 1  # fairseq's number of the first position
    positions = sinusoids(first + tokens.shape[1], dim)[first:].to(embedding.dtype)
    x = math.sqrt(dim) * embedding[tokens] + positions  # (B, T, C)
    for layer in range(layers):
        x = _layer(x, state, f"decoder.layers.{layer}.", heads, pre_norm)
    if pre_norm:
        x = _norm(x, state, "decoder.layer_norm")
    return x @ state["decoder.output_projection.weight"].T


def _layer(x: Tensor, state: State, prefix: str, heads: int, pre_norm: bool) -> Tensor:
    attention_norm, ffn_norm = prefix + "self_attn_layer_norm", prefix + "final_layer_norm"
    if pre_norm:
        x = x + _attention(_norm(x, state, attention_norm), state, prefix + "self_attn.", heads)
        return x + _ffn(_norm(x, state, ffn_norm), state, prefix)
    x = _norm(x + _attention(x, state, prefix + "self_attn.", heads), state, attention_norm)
    return _norm(x + _ffn(x, state, prefix), state, ffn_norm)


def _attention(x: Tensor, state: State, prefix: str, heads: int) -> Tensor:
    q, k, v = (
        _linear(x, state, prefix + name).unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, T, d)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    out = flow_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, T, C)
    return _linear(out, state, prefix + "out_proj")


def _ffn(x: Tensor, state: State, prefix: str) -> Tensor:
    return _linear(_linear(x, state, prefix + "fc1").relu(), state, prefix + "fc2")


def _linear(x: Tensor, state: State, name: str) -> Tensor:
    return F.linear(x, state[name + ".weight"], state[name + ".bias"])


def _norm(x: Tensor, state: State, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[name + ".weight"], state[name + ".bias"])
