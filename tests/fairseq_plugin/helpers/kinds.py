"""Every kind of model of the plugin, tiny, as fairseq-train builds it, and the batches that it reads.

A new mechanism is tested without an edit here; a new kind of model is one ``Kind``.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import models as models_of_fairseq
from fairseq import options, tasks
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

import fairseq_plugin  # noqa: F401  registers the models
from common.attention import ATTENTIONS
from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.data.series_folder import Description
from fairseq_plugin.models.hybrid import LayerOptions
from recipes.models import model_options
from tests.fairseq_plugin.helpers import masked_models
from tests.fairseq_plugin.helpers.language_models import awake
from tests.fairseq_plugin.helpers.text import PAD, dictionary, tokens

Batch = dict[str, Tensor]
LIMIT, CHANNELS = 40, 3  # the most tokens, and the numbers of a step of a series, an episode or a frame
#: Values of options, by the ends of their names, with which toy inputs cross several chunks, rows and windows.
SHORT = {"chunk-size": "8", "row-length": "4", "bias-dim": "4", "flash-query-dim": "8"}
SHORT |= {f"{x}-window": "5" for x in ("daft", "conv", "lolcats")}
SIZES = "--encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --dropout 0 "
SIZES += "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
SIZES += "--decoder-input-dim 16 --decoder-output-dim 16 --attention-dropout 0 --activation-dropout 0"
AUDIO = "--lineartime-max-frames 60 --conv-pos 8 --conv-pos-groups 2 --final-dim 8 --extractor-mode layer_norm "
AUDIO += "--mask-length 2 --depthwise-conv-kernel-size 5 --conv-feature-layers"
CONVOLUTIONS = "[(16, 6, 2)] + [(16, 3, 2)] * 2"
SERIES = Description(["slow", "Fast", "none"], [0.0] * CHANNELS, [1.0] * CHANNELS, LIMIT)
EPISODES = EpisodeDescription(
    "toy", "", [0.0] * CHANNELS, [1.0] * CHANNELS, [-1.0] * 2, [1.0] * 2, LIMIT, 0.0, 5.0, 10.0
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masked_rows(x: Tensor, left: int, right: int) -> Tensor:
    """True where ``x`` (B, T, ...) has padding after ``left`` and ``right`` tokens of it were added."""
    return F.pad(torch.zeros(x.shape[:2], dtype=torch.bool), (left, right), value=True)


def pad_tokens(batch: Batch, left: int, right: int) -> Batch:
    return {"src_tokens": F.pad(batch["src_tokens"], (left, right), value=PAD)}


def pad_numbers(batch: Batch, left: int, right: int) -> Batch:
    """Padding holds no numbers, and valid numbers of steps."""
    first = next(iter(batch.values()))
    numbers = {name: F.pad(x, (0, 0, left, right), value=torch.nan) for name, x in batch.items() if x.dim() == 3}
    steps = {name: F.pad(x, (left, right), value=LIMIT - 1) for name, x in batch.items() if x.dim() == 2}
    return {**numbers, **steps, "padding_mask": masked_rows(first, left, right)}


def pad_source(batch: Batch, left: int, right: int) -> Batch:
    source = F.pad(batch["src_tokens"], (left, right), value=PAD)
    return {**batch, "src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}


def pad_recordings(batch: Batch, left: int, right: int) -> Batch:
    """Beside a longer recording, in a last row; fairseq has no padding otherwise."""
    source, length = batch["src_tokens"], batch["src_tokens"].shape[1] + 4 * (left + right)
    lengths = torch.cat([batch["src_lengths"], torch.tensor([length])])
    targets = torch.cat([batch["prev_output_tokens"], batch["prev_output_tokens"][:1]])
    source = torch.cat(
        [F.pad(source, (0, 0, 0, length - source.shape[1]), value=9.0), noise(1, length, source.shape[2])]
    )
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": targets}


class Kind(NamedTuple):
    """One kind of model."""

    task: str  # arguments of fairseq-train, beside the architecture and its sizes
    stock: str  # fairseq's model of this kind
    rows: Callable[[int, int], Batch]  # (batch, length) -> what a model reads
    pad: Callable[[Batch, int, int], Batch]
    out: Callable[[Any], Tensor] = lambda result: result[0]
    causal: bool = False
    places: bool = True  # an output for each place that may be padding, and not one for each row
    head: dict[str, Any] = {}  # further arguments of a call


def _pairs(batch: int, length: int) -> Batch:
    source = tokens(batch, length)
    return {"src_tokens": source, "src_lengths": torch.full((batch,), length)} | {
        "prev_output_tokens": tokens(batch, 11, seed=1)
    }


def _frames(batch: int, length: int) -> Batch:
    """An odd number of frames, of which two convolutions leave a quarter."""
    frames = {"src_tokens": noise(batch, 4 * length + 1, 10), "src_lengths": torch.full((batch,), 4 * length + 1)}
    return _pairs(batch, length) | frames


def _steps(batch: int, length: int) -> Batch:
    numbers = {"returns": 1, "states": CHANNELS, "actions": 2}
    return {name: noise(batch, length, size, seed=i) for i, (name, size) in enumerate(numbers.items())} | {
        "timesteps": torch.arange(length).expand(batch, length)
    }


def _words(batch: int, length: int) -> Batch:
    return {"src_tokens": tokens(batch, length)}


def _audio(task: str, stock: str) -> Kind:
    """Frames of 8 samples; fairseq has padding after recordings alone."""
    return Kind(
        task,
        stock,
        rows=lambda batch, length: {"source": noise(batch, 8 * length + 14), "mask": False, "features_only": True},
        pad=lambda batch, left, right: {
            **batch,
            "source": F.pad(batch["source"], (0, 8 * (left + right)), value=9.0),
            "padding_mask": F.pad(
                torch.zeros_like(batch["source"], dtype=torch.bool), (0, 8 * (left + right)), value=True
            ),
        },
        out=lambda result: result["x"],
    )


KINDS = {
    "_lm": Kind("--task language_modeling", "transformer_lm", _words, pad_tokens, causal=True),
    "_mlm": Kind("--task masked_lm --criterion masked_lm", "roberta", _words, pad_tokens),
    "_classifier": Kind(
        "--task sentence_prediction --criterion sentence_prediction --num-classes 3", "roberta", _words, pad_tokens
    ),
    "_time_series": Kind(
        "--task time_series_classification --criterion sentence_prediction",
        "",
        lambda batch, length: {"source": noise(batch, length, CHANNELS)},
        pad_numbers,
        places=False,
        head={"classification_head_name": "toy"},
    ),
    "_decision": Kind(
        "--task offline_rl --criterion action_mse", "", _steps, pad_numbers, out=lambda result: result, causal=True
    ),
    "_wav2vec2": _audio(
        "--task audio_pretraining --criterion wav2vec --quantize-targets --latent-vars 4 --num-negatives 5", "wav2vec2"
    ),
    "_hubert": _audio(
        "--task hubert_pretraining --criterion hubert --label-rate 2000 --labels ['km'] --skip-nomask", "hubert"
    ),
    "_data2vec_audio": _audio("--task audio_pretraining --criterion model --average-top-k-layers 2", "data2vec_audio"),
    "s2t_": Kind(
        "--task speech_to_text --criterion label_smoothed_cross_entropy --conv-channels 16 --conv-kernel-sizes 3,3",
        "s2t_transformer",
        _frames,
        pad_recordings,
        places=False,
    ),
    "": Kind("--task translation", "transformer", _pairs, pad_source, places=False),  # encoder-decoders
}
#: Models of decisions and series in which no token attends.
WITHOUT_ATTENTION = ("bc_decision", "awac_decision", "lstm_time_series", "tcn_time_series")
OURS = sorted(name for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_plugin."))


def ending_of(name: str) -> str:
    """The key of ``KINDS`` for a model or an architecture."""
    name = {"roberta": "roberta_mlm"}.get(name, f"_{ARCH_MODEL_NAME_REGISTRY.get(name, name)}")
    return next(x for x in KINDS if (name.startswith(f"_{x}") if x == "s2t_" else name.endswith(x)))


def kind_of(name: str) -> Kind:
    return KINDS[ending_of(name)]


def models(*endings: str) -> list[str]:
    """The models of some kinds."""
    return [name for name in OURS if ending_of(name) in endings]


@cache
def flags_of(name: str) -> dict[str, Any]:
    """Every option of a model with its default; of a stack, those of the attentions that it has by default."""
    parser = ArgumentParser(allow_abbrev=False)
    MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY.get(name, name)].add_args(parser)
    kinds = LayerOptions.lineartime_layers.split(",") if "hybrid" in name else ATTENTIONS
    others = tuple(f"--{x.replace('_', '-')}-" for x in ATTENTIONS if x not in kinds)
    return {
        action.option_strings[0]: action
        for action in parser._actions
        if action.option_strings and action.dest != "help" and not action.option_strings[0].startswith(others)
    }


def command(arch: str, *arguments: str, sizes: bool = True) -> list[str]:
    """The arguments of fairseq-train; later ones win, and sizes that the model does not know are left out."""
    known = flags_of(arch) if sizes else {}
    words = ["data", *kind_of(arch).task.split(), "--arch", arch]
    pairs = f"{SIZES} --max-source-positions 96 --max-positions {LIMIT}".split()
    pairs += [*AUDIO.split(), CONVOLUTIONS]
    for flag, value in zip(pairs[::2], pairs[1::2]):
        words += [flag, value] if flag in known else []
    for flag in known if "--lineartime-layers" not in arguments else ():
        value = next((value for end, value in SHORT.items() if flag.endswith(end)), None)
        words += [flag, value] if value else []
    if ending_of(arch) in ("_lm", "_mlm"):
        words += ["--tokens-per-sample", str(LIMIT)]
    return [*words, *arguments]


def build_command(words: list[str], symbols: int = 60, seed: int = 1) -> nn.Module:
    """The model that ``fairseq-train WORDS`` builds for a dictionary of ``symbols``, as initialised."""
    given, made = model_options(words), dictionary(symbols)
    given.input_feat_per_channel, given.input_channels = 10, 1  # as a task of speech sets them
    torch.default_generator.manual_seed(seed)
    model = tasks.FairseqTask.build_model(host(given.arch, made), given)
    if ending_of(given.arch) in ("_classifier", "_time_series"):
        model.register_classification_head("toy", 3)
    return model


def host(arch: str, symbols: Dictionary) -> SimpleNamespace:
    """What models read of a task."""
    task = SimpleNamespace(
        source_dictionary=None if arch.startswith("s2t") else symbols,
        target_dictionary=symbols,
        dictionaries=[symbols],
        max_positions=lambda: LIMIT,
        max_length=LIMIT,
        context=None,
        max_episode_length=LIMIT,
        description=EPISODES if arch.endswith("_decision") else SERIES,
        cfg=SimpleNamespace(sample_rate=16_000),
    )
    task.build_model = lambda cfg, **_: models_of_fairseq.build_model(cfg, task)
    task.load_state_dict = lambda state: None
    return task


def build(arch: str, *arguments: str, sizes: bool = True, words: int = 60, seed: int = 1) -> nn.Module:
    """A tiny model, or one of its own sizes."""
    return build_command(command(arch, *arguments, sizes=sizes), words, seed)


def save(path: Path, arch: str, state: dict[str, Tensor], *arguments: str) -> None:
    """Write what fairseq-train writes."""
    config = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), command(arch, *arguments))
    )
    stored = {"cfg": OmegaConf.to_container(config, enum_to_str=True), "args": None, "model": state}
    stored |= {"optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}], "task_state": {}}
    torch.save({**stored, "extra_state": {"train_iterator": {"epoch": 1}}}, path)


def load(path: Path, arch: str, **overrides: Any) -> nn.Module:
    """The model of a file as fairseq's commands load it."""
    (model,), _ = load_model_ensemble([str(path)], overrides, task=host(arch, dictionary()))
    return model.eval()


def randomised(model: nn.Module, std: float = 0.4, seed: int = 2) -> nn.Module:
    """``model`` with every parameter N(0, std), and attention that shows in its outputs."""
    return awake(masked_models.randomised(model, std, seed))


def shown(arch: str, *arguments: str, **options: Any) -> nn.Module:
    """A model in float64 and evaluation mode whose outputs depend on every part of it."""
    return randomised(build(arch, *arguments, **options).double()).eval()


def call(model: nn.Module, kind: Kind, batch: Batch) -> Tensor:
    """The outputs (B, T, ...) or (B, ...) of a batch, in the model's dtype."""
    dtype = next(model.parameters()).dtype
    given = {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}
    return kind.out(model(**given, **kind.head))
