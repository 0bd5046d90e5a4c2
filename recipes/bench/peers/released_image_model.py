"""The authors' hierarchical vision model as formulas on a state dict with their names, to compare our model with.

Transcribed from Flowformer_CV/flowformer.py of thuml/Flowformer (MIT licence, Wu et al.): the computation only, one
function per module of that file.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional as F

from .released_attention import image_model

State = Mapping[str, Tensor]


def released_shapes(
    classes: int, side: int, embed_dims: Sequence[int], depths: Sequence[int], patch: int = 4
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of their model for square images."""
    shapes: dict[str, tuple[int, ...]] = {"pos_embed": (1, (side // patch) ** 2, embed_dims[0])}
    inputs = (3, *embed_dims)
    for i, (dim, depth) in enumerate(zip(embed_dims, depths)):
        kernel = patch if i == 0 else 2
        shapes[f"patch_embed.{i}.proj.weight"] = (dim, inputs[i], kernel, kernel)
        shapes[f"patch_embed.{i}.proj.bias"] = (dim,)
        for j in range(depth):
            block = f"blocks.{i}.{j}."
            shapes[block + "gamma"] = (dim,)
            for norm in ("norm1", "norm2"):
                shapes[f"{block}{norm}.weight"] = shapes[f"{block}{norm}.bias"] = (dim,)
            sizes = {"attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim), "mlp.fc1": (4 * dim, dim)}
            for layer, (out, into) in {**sizes, "mlp.fc2": (dim, 4 * dim)}.items():
                shapes[f"{block}{layer}.weight"] = (out, into)
                shapes[f"{block}{layer}.bias"] = (out,)
    shapes["norm.weight"] = shapes["norm.bias"] = (embed_dims[-1],)
    shapes["head.weight"], shapes["head.bias"] = (classes, embed_dims[-1]), (classes,)
    return shapes


def released_attention(x: Tensor, state: State, prefix: str, heads: int) -> Tensor:
    """Their Flow_Attention: x (B, N, C) -> (B, N, C)."""
    B, N, C = x.shape
    qkv = F.linear(x, state[prefix + "qkv.weight"], state[prefix + "qkv.bias"])
    q, k, v = qkv.reshape(B, N, 3, heads, C // heads).permute(2, 0, 3, 1, 4)  # each (B, H, N, d)
    out = image_model(q, k, v).transpose(1, 2).reshape(B, N, C)
    return F.linear(out, state[prefix + "proj.weight"], state[prefix + "proj.bias"])


def released_block(x: Tensor, state: State, prefix: str, heads: int) -> Tensor:
    """Their My_BlockLayerScale: layer scale on the MLP branch alone."""

    def norm(name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{prefix}{name}.weight"], state[f"{prefix}{name}.bias"], 1e-6)

    x = x + released_attention(norm("norm1"), state, prefix + "attn.", heads)
    hidden = F.gelu(F.linear(norm("norm2"), state[prefix + "mlp.fc1.weight"], state[prefix + "mlp.fc1.bias"]))
    return x + state[prefix + "gamma"] * F.linear(
        hidden, state[prefix + "mlp.fc2.weight"], state[prefix + "mlp.fc2.bias"]
    )


def released_forward(x: Tensor, state: State, depths: Sequence[int], heads: int = 12) -> Tensor:
    """Their Flowformer: square images (B, 3, H, W) -> logits (B, classes)."""
    for i, depth in enumerate(depths):
        weight = state[f"patch_embed.{i}.proj.weight"]
        x = F.conv2d(x, weight, state[f"patch_embed.{i}.proj.bias"], stride=weight.shape[-1])
        B, C, H, W = x.shape
        x = x.flatten(2).transpose(1, 2)  # (B, C, H, W) -> (B, N, C)
        if i == 0:
            x = x + state["pos_embed"]
        for j in range(depth):
            x = released_block(x, state, f"blocks.{i}.{j}.", heads)
        x = x.transpose(1, 2).reshape(B, C, H, W)
    x = x.flatten(2).transpose(1, 2)
    x = F.layer_norm(x, x.shape[-1:], state["norm.weight"], state["norm.bias"], 1e-6)
    return F.linear(x.mean(1), state["head.weight"], state["head.bias"])
