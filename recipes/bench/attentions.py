"""Every registered attention with default options beside fused softmax attention, and one step of its decoding."""

import copy
import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from common.attention import ATTENTIONS, InnerAttention, NoReference, build_attention

from .measure import DECODING, Candidate, Case, Place, compared, error, random, runs_of

H, D, SOFTMAX = 8, 64, "softmax"


def is_causal(name: str) -> bool:
    """Whether an attention supports causal; it is measured so then."""
    return "causal" in ATTENTIONS[name].supports


def _build(name: str, causal: bool, tokens: int, heads: int, place: Place) -> InnerAttention:
    torch.manual_seed(1)
    dims = 2 if "spatial_shape" in ATTENTIONS[name].needs else 1
    module = build_attention(name, causal, num_heads=heads, head_dim=D, max_tokens=tokens, spatial_dims=dims)
    with torch.no_grad():
        for parameter in module.parameters():  # some start at 0, which would hide an error in their use
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return place(module).eval()


def _shapes(module: InnerAttention, tokens: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that a module takes: its projections and its further inputs."""
    heads = module.shape.num_heads
    projected = {x: (1, heads, tokens, width) for x, width in module.projections(D).items()}
    return {**projected, **module.inputs(x=(1, tokens, heads * D), source_q=(1, heads, tokens, D))}


def _function(module: InnerAttention, method: str, shapes: dict) -> Callable[..., Tensor]:
    """A method of a module as a function of the tensors that ``shapes`` names; further arguments are parameters."""

    def call(*tensors: Tensor) -> Tensor:
        named = dict(zip(shapes, tensors))
        side = math.isqrt(shapes["v"][2])
        qkv = [named.pop(x, None) for x in ("q", "k", "v")]
        return getattr(module, method)(*qkv, **named, **module.inputs(spatial_shape=(side, side)))

    return call


@cache  # cases and sizes share the comparisons of softmax and of short inputs
def _errors(name: str, causal: bool, tokens: int, heads: int, method: str, place: Place) -> dict[str, float]:
    module = _build(name, causal, tokens, heads, place)
    shapes = _shapes(module, tokens)
    literal = _function(copy.deepcopy(module).double(), method, shapes)
    return compared(_function(module, "forward", shapes), literal, random(place, *shapes.values()))


def beside_softmax(name: str, size: int, place: Place) -> list[Candidate]:
    """An attention and fused softmax attention, both causal if the attention can be."""
    made, causal = [], is_causal(name)
    for kind in (name, SOFTMAX):
        module = _build(kind, causal, size, H, place)
        shapes = _shapes(module, size)
        inputs = [*random(place, *shapes.values()), *module.parameters()]  # parameters get gradients as well

        def check(kind: str = kind) -> dict[str, float]:
            try:
                literal = _errors(kind, causal, 36, 2, "reference", place)
            except NoReference:  # a user's own
                literal = {}
            double = _errors(kind, causal, min(size, 1024), H, "forward", place)
            return {**literal, **{f"{tensor}, in float64": x for tensor, x in double.items()}}

        made.append(Candidate(kind, size, runs_of(_function(module, "forward", shapes), inputs), check))
    return made


def steps(size: int, place: Place) -> list[Candidate]:
    """The token after ``size`` others by every causal attention, softmax with its cache."""
    return [_step(name, size, place) for name in dict.fromkeys((SOFTMAX, *ATTENTIONS)) if is_causal(name)]


def _step(name: str, size: int, place: Place) -> Candidate:
    module = _build(name, True, size + 1, H, place)
    shapes = _shapes(module, size + 1)
    inputs = dict(zip(shapes, (x.detach() for x in random(place, *shapes.values()))))

    def cut(start: int, stop: int) -> dict[str, Tensor | None]:
        """Tokens ``start`` to ``stop``; they are dimension -2 of each input."""
        return dict.fromkeys("qkv") | {x: tensor[..., start:stop, :] for x, tensor in inputs.items()}

    token = cut(size, size + 1)
    with torch.no_grad():
        expected = module.forward(**cut(0, size + 1))[..., -1:, :]
        _, state = module.extend(**cut(0, size))

    @torch.no_grad()
    def step() -> list[Tensor]:
        out, after = module.extend(**token, state=state)
        return [out, *after.values()]

    return Candidate(name, 1, {DECODING: step}, lambda: {"output": error(step()[0], expected)})


def cases() -> dict[str, Case]:
    """A case for every attention that is registered now."""
    made = {
        f"attention_{name}": Case(
            "Every registered attention, beside fused softmax attention",
            (256, 1024) if "spatial_shape" in kind.needs else (256, 1024, 4096),  # squares; images take minutes
            partial(beside_softmax, name),
            SOFTMAX,
        )
        for name, kind in ATTENTIONS.items()
        if name != SOFTMAX
    }
    # Two whole chunks of 64 tokens before it, and a part of one.
    made["attention_steps"] = Case(
        "One decoded token of every causal attention by itself", (135,), steps, SOFTMAX, axis="position"
    )
    return made
