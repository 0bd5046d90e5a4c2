"""Checkpoints as fairseq-train of today and of its earlier versions writes them, around any weights."""

from argparse import Namespace
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor, nn

from . import encoder_decoders, language_models, masked_models
from .language_models import SMALL, awake, small

#: The two kinds: a dictionary of groups of options, and one argparse.Namespace of all of them.
KINDS = ("cfg", "args")
#: Symbols of the dictionary of ``data_bin``: its words, fairseq's four, and none to fill up.
WORDS = 60
STOCK = ("transformer_lm", *SMALL)
_NEW_OPTIONS = ("ema", "decoder_xformers_att_config", "scale_fc", "scale_attn", "scale_heads", "scale_resids")


def command(arch: str, *arguments: str) -> list[str]:
    """A training's arguments; later ones win."""
    others = {"translation", "sentence_prediction"}
    tokens = () if others & {*arguments} else ("--tokens-per-sample", "48")
    return ["data", "--task", "language_modeling", "--arch", arch, *tokens, *arguments]


def build(arch: str, *arguments: str, words: int = WORDS, seed: int = 1) -> nn.Module:
    """The model of ``command``, with weights under which attention shows."""
    return awake(language_models.build(command(arch, *arguments), words, seed)).eval()


def _parsed(arch: str, *arguments: str) -> Namespace:
    return options.parse_args_and_arch(options.get_training_parser(), command(arch, *arguments))


@cache  # it takes a third of a second, and few are different
def _configuration(arch: str, *arguments: str) -> dict[str, Any]:
    config = convert_namespace_to_omegaconf(_parsed(arch, *arguments))
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True)


def save(path: Path, weights: dict[str, Tensor], kind: str, arch: str, *arguments: str) -> Path:
    """Write ``weights`` as the training ``command(arch, *arguments)`` would, ``kind`` being one of KINDS."""
    args = _parsed(arch, *arguments)
    state: dict[str, Any] = {
        "args": args if kind == "args" else None,
        "model": weights,
        "criterion": None,
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "num_updates": 7,
                "lr_scheduler_state": {"best": None},
            },
        ],
        "task_state": {},
        "extra_state": {
            "metrics": [],
            "previous_training_time": 1.5,
            "val_loss": 4.2,
            "train_iterator": {"epoch": 2, "iterations_in_epoch": 0, "shuffle": True, "version": 2},
        },
        "last_optimizer_state": {"state": {0: {"step": 7, "exp_avg": torch.zeros(4)}}, "param_groups": []},
    }
    if kind == "cfg":
        config = deepcopy(_configuration(arch, *arguments))
        for group in (config, config["model"]):  # of fairseq's first versions with groups
            for name in _NEW_OPTIONS:
                group.pop(name, None)
        state["cfg"] = config
    torch.save(state, path)
    return path


def save_model(path: Path, kind: str, arch: str, *arguments: str, seed: int = 1) -> nn.Module:
    """Write the checkpoint of a model, small unless told otherwise, and return it."""
    is_encoder = "masked_lm" in arguments or "sentence_prediction" in arguments
    sizes = masked_models.small(arch) if is_encoder else small(arch)
    arguments = (*(encoder_decoders.SMALL if "translation" in arguments else sizes), *arguments)
    model = build(arch, *arguments, words=WORDS + is_encoder, seed=seed)  # these tasks have a symbol for a mask
    if is_encoder:
        masked_models.randomised(model, std=0.2)
    if "sentence_prediction" in arguments:
        model.register_classification_head("sentence_classification_head", num_classes=2)
    save(path, model.state_dict(), kind, arch, *arguments)
    return model
