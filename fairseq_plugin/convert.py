"""``python -m fairseq_plugin.convert SOURCE TARGET``: weights of ``transformer_lm`` as a start for a model of ours.

Also makes the authors' released language model, which calls itself ``transformer_lm``, one that every tool of fairseq
loads. The weights are taken as they are; the model between them is another one.
"""

import argparse
import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf

from common.checkpoints import Transfer, read_checkpoint

from .checkpoints import CheckedLoading, stock_overrides, stored_architecture

#: What only goes on training the model that was.
_LEFT_OUT = ("last_optimizer_state",)


def convert(source: Path, arch: str, overrides: Optional[Dict[str, Any]] = None) -> Tuple[Dict[str, Any], Transfer]:
    """The checkpoint ``source`` of ``transformer_lm`` as one of ``arch``, and what was taken, left out and new.

    ``overrides`` are options of the model. The result is built and loaded once, to see that it fits.

    Raises:
        ValueError: a file that cannot be read, or of another architecture; an ``arch`` that has other weights, or
            options under which they do not fit.
    """
    target = ARCH_MODEL_REGISTRY.get(arch)
    if target is None or not issubclass(target, CheckedLoading) or not target.takes_stock_weights:
        fitting = [name for name, model in ARCH_MODEL_REGISTRY.items() if getattr(model, "takes_stock_weights", False)]
        raise ValueError(f"arch is {arch!r}; allowed: {', '.join(sorted(fitting))}")
    state = read_checkpoint(source)
    stored = stored_architecture(state, str(source))
    if ARCH_MODEL_REGISTRY.get(stored) is not TransformerLanguageModel:
        raise ValueError(f"the checkpoint {str(source)!r} holds {stored!r}; allowed: 'transformer_lm' and its sizes")
    given = stock_overrides(state, target, overrides or {})
    if state.get("cfg"):
        config = OmegaConf.create(state["cfg"])
        overwrite_args_by_name(config, given)
    else:
        for name, value in given.items():
            setattr(state["args"], name, value)
        config = convert_namespace_to_omegaconf(state["args"])
    _check_fit(config.model, state["model"])
    left_out = [name for name in _LEFT_OUT if name in state]
    converted = {name: value for name, value in state.items() if name not in (*left_out, "args")}
    converted["cfg"] = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    return {"args": None, **converted}, Transfer(list(state["model"]), left_out, [])


def _check_fit(config: Any, weights: Dict[str, torch.Tensor]) -> None:
    """Build the model, for as many symbols as ``weights`` have, and load them; ValueError if they do not fit."""
    symbols = Dictionary()
    # One table, or with adaptive inputs one per band of frequency, each followed by a projection.
    tables = [x for name, x in weights.items() if re.fullmatch(r"decoder\.embed_tokens\.(.*\.0\.)?weight", name)]
    for i in range(sum(len(table) for table in tables) - len(symbols)):
        symbols.add_symbol(f"symbol{i}")
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    build_model(config.copy(), task, from_checkpoint=True).load_state_dict(weights)


def main(arguments: Sequence[str]) -> None:
    """Convert a file; exits with one line where that cannot be done, and writes nothing then."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_plugin.convert", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="checkpoint of transformer_lm")
    parser.add_argument("target", type=Path, help="file to write, for any tool of fairseq")
    parser.add_argument("--arch", default="flowformer_lm", help="flowformer_lm, linear_lm or softmax_lm")
    parser.add_argument("--model-overrides", default="{}", help="options of the model, as in fairseq-eval-lm")
    options = parser.parse_args(arguments)
    try:
        converted, transfer = convert(options.source, options.arch, ast.literal_eval(options.model_overrides))
    except ValueError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    part = options.target.with_name(options.target.name + ".part")
    torch.save(converted, part)
    part.replace(options.target)
    print(f"{options.target}: {options.arch}; {transfer.summary()}")


if __name__ == "__main__":
    main(sys.argv[1:])
