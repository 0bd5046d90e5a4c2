"""A host's mask means the same in every dtype that the host accepts; others are refused in one line."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from itertools import product
from pkgutil import walk_packages
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.naflexvit import create_attention_mask
from torch import Tensor, nn

import fairseq_plugin
import timm_plugin
from tests.fairseq_plugin.helpers import huggingface_models
from tests.fairseq_plugin.helpers.kinds import build, call, kind_of, randomised
from timm_plugin.layers.gated_attention_block import GatedAttentionBlock

PAD = 1
DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 10, 4, 2], [9, 8, 7, 6, 2, PAD, PAD, PAD]])
TARGET = torch.tensor([[2, 9, 8, 7, 6, 5], [2, 5, 6, 7, PAD, PAD]])


def _mask(tokens: int, real: int) -> Tensor:
    """The padding mask of a whole row and of one with ``real`` real tokens."""
    return torch.arange(tokens) >= torch.tensor([[tokens], [real]])


def _of_numbers(model: nn.Module, arch: str) -> Tensor:
    """The outputs for recordings, series or steps of episodes, the second of which is shorter."""
    kind = kind_of(arch)
    batch = kind.rows(2, 12)
    longest = next(iter(batch.values())).shape[1]
    return call(model, kind, {**batch, "padding_mask": _mask(longest, longest - longest // 3)})


def _of_speech(model: nn.Module) -> Tensor:
    frames = torch.randn(2, 40, 10, generator=torch.Generator().manual_seed(0))
    return model(frames, torch.tensor([40, 23]), TARGET)[0]


def _of_pair(model: nn.Module) -> Tensor:
    """Scores of a target as a whole, then token by token."""
    encoded, state = model.encoder(SOURCE, SOURCE.ne(PAD).sum(1)), {}
    steps = [model.decoder(TARGET[:, :n], encoded, incremental_state=state)[0] for n in range(1, 5)]
    return torch.cat([model.decoder(TARGET, encoded)[0], *steps], 1)


def _of_text(model: nn.Module) -> Tensor:
    """Scores of a text as a whole, then in two parts."""
    state: dict[str, Any] = {}
    parts = [model.decoder.extend_features(part, state)[0] for part in SOURCE.flip(1).split([5, 3], 1)]
    return torch.cat([model(SOURCE)[0].flatten(), *(part.flatten() for part in parts)])


NUMBERS = [
    f"flow_{kind}{options}"
    for kind in ("wav2vec2", "hubert", "data2vec_audio")
    for options in ("", " --lineartime-mask-padding")
]
NUMBERS += ["flow_wav2vec2 --layer-type conformer --lineartime-mask-padding", "linear_time_series", "tcn_time_series"]
PAIRS = ("", "--lineartime-cross-attention linear", "--lineartime-cross-attention flow_source")
#: fairseq's models with our attention, with every place where a mask enters.
OF_FAIRSEQ: dict[str, Callable[[nn.Module], Tensor]] = {
    **{words: partial(_of_numbers, arch=words.split()[0]) for words in (*NUMBERS, "linear_decision")},
    **dict.fromkeys(("s2t_flow", "s2t_conformer_flow --lineartime-mask-padding"), _of_speech),
    **{f"linear {words}": _of_pair for words in (*PAIRS, "--no-cross-attention --cross-self-attention")},
    **dict.fromkeys(("linear_lm", "flash_lm"), _of_text),
    **dict.fromkeys(("linear_mlm", "flash_mlm"), lambda model: model(SOURCE, features_only=True)[0]),
}


@cache
def _built(case: str) -> nn.Module:
    return randomised(build(*case.split()), 0.3).eval()


def _masks_of(module: type[nn.Module]) -> list[str]:
    return [name for name in inspect.signature(module.forward).parameters if name.endswith("padding_mask")]


@contextmanager
def _masks_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``model`` and its modules, other than mechanisms, are called with padding masks of ``dtype``."""

    def convert(module: nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        call = inspect.signature(module.forward).bind(*arguments, **options)
        for named in (call.arguments, *[x for x in call.arguments.values() if isinstance(x, dict)]):
            masks = {name: x for name, x in named.items() if name.endswith("padding_mask") and isinstance(x, Tensor)}
            named.update({name: mask.to(dtype) for name, mask in masks.items()})
        return call.args, call.kwargs

    modules = [module for module in model.modules() if type(module).__module__.startswith("fairseq")]
    hooks = [module.register_forward_pre_hook(convert, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OF_FAIRSEQ)
@torch.no_grad()
def test_fairseqs_padding_masks(case: str, dtype: torch.dtype) -> None:
    """What is not 0 is padding, as in fairseq's own attention; also inside of the model, between its modules."""
    model, read = _built(case), OF_FAIRSEQ[case]
    expected = read(model)
    with _masks_in(model, dtype):
        assert torch.equal(read(model), expected)


def test_every_module_for_fairseq_that_takes_a_mask_is_tested() -> None:
    """A class that computes nothing of its mask is left out."""
    for module in walk_packages(fairseq_plugin.__path__, "fairseq_plugin."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    tested = {kind for case in OF_FAIRSEQ for module in _built(case).modules() for kind in type(module).__mro__}

    def ours(kind: type) -> Iterator[type]:
        for subclass in kind.__subclasses__():
            yield from ours(subclass)
            if subclass.__module__.startswith("fairseq_plugin.") and "forward" in vars(subclass):
                yield subclass

    taking = {kind.__name__ for kind in ours(nn.Module) if _masks_of(kind) and kind not in tested}
    assert taking == {"StatePolicy"}


def _of_transformers(kind: str) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    """A function that calls the model of ``kind`` with masks that its argument makes of those of real tokens."""
    tokens, target, real, real_target = SOURCE, TARGET, _mask(8, 5).logical_not(), _mask(6, 4).logical_not()
    if kind == "text":
        model = huggingface_models.language_models("linear_lm")[1]
        return lambda form: model(tokens, attention_mask=form(real)).logits[real]
    if kind == "prompt":
        model = huggingface_models.language_models("linear_lm")[1]
        return lambda form: model.generate(
            tokens.flip(1), attention_mask=form(real.flip(1)), max_new_tokens=5, do_sample=False
        )
    if kind == "masked":
        model = huggingface_models.masked("linear_mlm")[1]
        return lambda form: model(tokens, attention_mask=form(real)).logits[real]
    if kind == "classifier":
        model = huggingface_models.classifiers("linear_classifier")[1]
        return lambda form: model(tokens, attention_mask=form(real)).logits
    model = huggingface_models.encoder_decoder("linear")[1]
    encoded = (model.encoder(tokens, real).last_hidden_state,) if kind == "encoded" else None
    return lambda form: model(
        tokens if encoded is None else None,
        encoder_outputs=encoded,
        attention_mask=form(real),
        decoder_input_ids=target,
        decoder_attention_mask=form(real_target),
    ).logits[real_target]


@pytest.mark.parametrize("kind", ["text", "prompt", "masked", "classifier", "pair", "encoded"])
@torch.no_grad()
def test_masks_of_transformers(kind: str) -> None:
    """1 is real, in any dtype; what is neither 0 nor 1 is refused, such as an additive mask."""
    read = _of_transformers(kind)
    expected = read(lambda real: real)
    for dtype in DTYPES:
        assert torch.equal(read(lambda real, dtype=dtype: real.to(dtype)), expected), dtype
    for value in (-torch.inf, -10_000.0, 2.0, 0.5):
        with pytest.raises(ValueError, match=f"attention_mask has the value {value}; allowed: 1 at real"):
            read(lambda real, value=value: torch.zeros(real.shape).masked_fill(~real, value))
    with pytest.raises(ValueError, match="(must be 2D|has shape .*; allowed)"):
        read(lambda real: real[:, None, None, :].expand(-1, -1, real.shape[1], -1))


def _result(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor | None:
    """The output at real tokens, or None if the mask is refused."""
    try:
        return layer(x, attn_mask=mask)[~_mask(12, 7)]
    except (RuntimeError, ValueError) as error:
        assert isinstance(layer, Attention) or ("attn_mask" in str(error) and "\n" not in str(error)), error
        return None


@pytest.mark.parametrize(
    ("meaning", "dtype"), [("attends", torch.bool), *product(("attends", "added"), DTYPES)], ids=str
)
@torch.no_grad()
def test_masks_of_timms_attention(meaning: str, dtype: torch.dtype) -> None:
    """Padding for timm's attention, fused or not, is padding; a mask that timm reads as something else is refused."""
    torch.manual_seed(0)
    x, real, stock = torch.randn(2, 12, 16), ~_mask(12, 7), Attention(16, 2)
    layers = [timm_plugin.attention_layer(name)(16, 2) for name in ("flow", "softmax")]
    layers.append(randomised(GatedAttentionBlock(16, grid_size=(3, 4))))
    for options in ({}, {"symmetric": False}, {"symmetric": False, "q_len": 1}):
        added = create_attention_mask(real, **options)
        mask = (added == 0 if meaning == "attends" else added.clamp(min=-10_000.0)).to(dtype)
        read = []
        for stock.fused_attn in (True, False):
            result = _result(stock, x, mask)
            read += [] if result is None else [torch.allclose(result, _result(stock, x, added), atol=1e-5)]
        for layer in layers:
            expected, result = _result(layer, x, added), _result(layer, x, mask)
            assert result is not None or not any(read), "timm reads it as padding"
            assert result is None or (torch.equal(result, expected) and (all(read) or not read))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_patches_of_naflexvit(dtype: torch.dtype) -> None:
    """``patch_valid`` in each dtype, with which timm makes the mask."""
    torch.manual_seed(0)
    sizes = dict(embed_dim=48, num_heads=4, depth=2, num_classes=5)
    model = timm.create_model("naflexvit_base_patch16_map", attn_layer="flow", **sizes).eval()
    places, valid = torch.cartesian_prod(torch.arange(3), torch.arange(4)), ~_mask(12, 7)
    patches = dict(patches=torch.randn(2, 12, 768), patch_coord=places.expand(2, 12, 2))
    expected = model({**patches, "patch_valid": valid})
    assert not torch.equal(model({**patches, "patch_valid": valid | True}), expected)
    assert torch.equal(model({**patches, "patch_valid": valid.to(dtype)}), expected)
