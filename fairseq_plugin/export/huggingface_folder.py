"""Writes a checkpoint of fairseq as a folder for transformers, and reads such a folder."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from common import __version__, huggingface
from common._installed import version_numbers
from common.attention import ATTENTIONS
from common.checkpoints import read_checkpoint
from common.files.output_files import empty_folder
from common.huggingface import (
    AUTO_CLASSES,
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
)
from common.huggingface.modeling import HEAD
from common.ops.shared.checks import ArgumentError

from .huggingface import configuration_of
from .huggingface_card import files_of_own, model_card
from .huggingface_checkpoint import Source, exported_weights, load_source, plain_options, rebuilt_checkpoint
from .huggingface_tokenizers import Frame, check_kind, save_tokenizer

#: The model for each kind of checkpoint.
MODELS = {
    "causal": LineartimeForCausalLM,
    "masked": LineartimeForMaskedLM,
    "classifier": LineartimeForSequenceClassification,
    "encoder_decoder": LineartimeForSeq2SeqLM,
}
#: The field of config.json with what fairseq's checkpoint needs.
FIELD = "fairseq"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The file that transformers runs with ``trust_remote_code=True``, and the folder of an encoder-decoder's second
#: tokenizer.
MODELING, TARGET = "modeling_lineartime.py", "target_tokenizer"
#: fairseq-generate's defaults: tokens of a target, and hypotheses of a beam search.
_LONGEST_TARGET, _BEAMS = 200, 5
#: The number of tokens on which both models are compared, and the largest difference of their logits.
_COMPARED, _TOLERANCE = 24, 1e-3


def export_folder(
    checkpoint: Path, folder: Path, data: Path | None, kind: str, files: Mapping[str, Path]
) -> tuple[Source, LineartimeConfig]:
    """Write ``checkpoint`` into the new or empty ``folder``; returns what was exported, and its configuration.

    ``kind`` is how text becomes symbols, a name in ``huggingface_options.KINDS``, and ``files`` are those of its
    subwords. At the end the folder is loaded once, and its model is compared with fairseq's.

    Raises:
        ValueError: see ``load_source``, ``configuration_of`` and ``build_tokenizer``; or the folder is not empty; or
        the exported model has other outputs. Nothing is written then.
    """
    with empty_folder(folder, "target") as new:
        source = load_source(checkpoint, data)
        check_kind(kind, source.dictionary)
        weights = exported_weights(source)
        config = configuration_of(source.model, source.cfg.model, source.task.target_dictionary or source.dictionary)
        own = MODELS[source.kind]
        config.architectures, config.auto_map = [own.__name__], _auto_map()
        config.dtype = next((x.dtype for x in weights.values() if x.is_floating_point()), torch.float32)
        setattr(config, FIELD, plain_options(source))
        config.save_pretrained(new)
        _write_json(new / "generation_config.json", _generation(source, config))
        _save_weights(weights, new / WEIGHTS)
        _save_tokenizers(source, config, new, kind, files)
        copyfile(Path(huggingface.__file__).with_name(MODELING), new / MODELING)
        for name, file in files_of_own(config).items():
            copyfile(inspect.getsourcefile(ATTENTIONS[name]), new / file)
        (new / "README.md").write_text(model_card(source, config, kind), encoding="utf-8")
        _check_same(source, own.from_pretrained(new, dtype=torch.float32).eval())
    return source, config


def _auto_map() -> dict[str, str]:
    """Where transformers finds configuration and models with ``trust_remote_code=True``."""
    module = MODELING.removesuffix(".py")
    classes = {AutoConfig: LineartimeConfig, **AUTO_CLASSES}
    return {auto.__name__: f"{module}.{own.__name__}" for auto, own in classes.items()}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    copies = {name: x.detach().cpu().contiguous().clone() for name, x in weights.items()}  # no shared memory
    save_file(copies, path, metadata={"format": "pt"})


def _generation(source: Source, config: LineartimeConfig) -> dict[str, Any]:
    """The options of generation with which transformers does what fairseq-generate does by default.

    fairseq never generates padding; of an encoder-decoder, it keeps 5 hypotheses of at most 200 tokens and the eos.
    """
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if source.kind in ("masked", "classifier"):
        return ids
    ids["suppress_tokens"] = [config.pad_token_id]
    if source.kind == "causal":
        return {**ids, "suppress_tokens": sorted({config.pad_token_id, *_copies_of_eos(source)})}
    longest = min(_LONGEST_TARGET, source.model.max_decoder_positions() - 1) + 1
    ids |= {"decoder_start_token_id": config.decoder_start_token_id, "forced_eos_token_id": config.eos_token_id}
    beams = {"num_beams": _BEAMS, "early_stopping": True, "length_penalty": 1.0}
    return {**ids, **beams, "max_new_tokens": longest, "min_new_tokens": 1}


def _copies_of_eos(source: Source) -> list[int]:
    """The other special symbols with the same scores as the eos, as in a converted GPT-2; a tie would go to them."""
    weights, eos = getattr(source.model.decoder.output_projection, "weight", None), source.dictionary.eos()
    special = range(min(source.dictionary.nspecial, 0 if weights is None else len(weights)))
    return [i for i in special if i != eos and torch.equal(weights[i], weights[eos])]


def _save_tokenizers(
    source: Source, config: LineartimeConfig, folder: Path, kind: str, files: Mapping[str, Path]
) -> None:
    dictionary, eos = source.dictionary, source.dictionary.eos()
    side = getattr(source.model, "decoder" if source.kind == "causal" else "encoder")
    options: dict[str, Any] = {"longest": getattr(side, "sentence_encoder", side).max_tokens, "files": files}
    if source.kind == "causal":
        frame, options = Frame((config.bos_token_id,)), {**options, "bos": config.bos_token_id, "padding_side": "left"}
    elif source.kind == "masked":
        frame = Frame((dictionary.bos(),), (eos,), (eos,))
    elif source.kind == "classifier":
        task = source.task.cfg
        before, between = ((() if x is None else (x,)) for x in (task.init_token, task.separator_token))
        frame = Frame(before, (eos,), between)
    else:
        frame = Frame((), (eos,))
        target = {**options, "longest": source.model.decoder.max_tokens}
        save_tokenizer(folder / TARGET, kind, source.task.target_dictionary, frame, **target)
    save_tokenizer(folder, kind, dictionary, frame, **options)


@torch.no_grad()
def _check_same(source: Source, exported: PreTrainedModel) -> None:
    """Raise ValueError unless both models have the same outputs for random tokens, two rows of which one is padded."""
    generator = torch.Generator().manual_seed(1)
    model, dictionary = source.model.float(), source.dictionary
    side = model.decoder if source.kind == "causal" else getattr(model.encoder, "sentence_encoder", model.encoder)
    length = min(_COMPARED, side.max_tokens or _COMPARED)
    first = min(dictionary.nspecial, len(dictionary) - 1)
    tokens = torch.randint(first, len(dictionary), (2, length), generator=generator)
    tokens[1, length // 2 :] = dictionary.pad()
    real = tokens.ne(dictionary.pad())
    inputs: dict[str, Tensor] = {"input_ids": tokens, "attention_mask": real.long()}
    if source.kind == "encoder_decoder":
        targets = tokens[:, :1].repeat(1, 3) % len(source.task.target_dictionary)
        expected = model(tokens, real.sum(1), targets)[0]
        logits = exported(**inputs, decoder_input_ids=targets).logits
    elif source.kind == "classifier":
        expected = model(tokens, classification_head_name=next(iter(model.classification_heads)))[0]
        logits = exported(**inputs).logits
    else:
        expected, logits = model(tokens)[0][real], exported(**inputs).logits[real]
    difference = float((expected - logits).abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ValueError(
            f"the exported model has other outputs than fairseq's {source.architecture} (they differ by "
            f"{difference:.3g}); allowed: a model without parts that have no counterpart in common.huggingface"
        )


def import_folder(folder: Path) -> dict[str, Any]:
    """The checkpoint for fairseq of a ``folder`` that ``export_folder`` wrote, or transformers after that.

    Raises:
        ValueError: the folder is no such folder, is of a newer version, or has other weights than the options need.
    """
    config = _read_config(folder)
    version = str(config.get("lineartime_version", ""))
    if version_numbers(version)[:2] > version_numbers(__version__)[:2]:
        raise ArgumentError(
            f"`folder` is {str(folder)!r}, written by lineartime {version}; allowed: at most {__version__}, this one"
        )
    options = config.get(FIELD)
    groups = ("model", "task", "trained")
    if not isinstance(options, dict) or not all(isinstance(options.get(x, {}), dict) for x in groups):
        options = None
    if options is None or not isinstance(options.get("architecture"), str) or not {"model", "task"} <= options.keys():
        raise ArgumentError(
            f"`folder` is {str(folder)!r}, whose config.json has no field {FIELD!r} with the options of fairseq; "
            "allowed: a folder of python -m fairseq_plugin.export_hf, also one that transformers has saved since"
        )
    head = f"classification_heads.{config.get('classifier_head')}."
    weights = {
        f"{head}{name.removeprefix(HEAD)}" if name.startswith(HEAD) else name: x
        for name, x in _read_weights(folder).items()
    }
    return rebuilt_checkpoint(options, weights, str(folder / "config.json"))


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder, "config.json")
    kind = config.get("model_type")
    if kind != LineartimeConfig.model_type:
        raise ArgumentError(
            f"`folder` is {str(folder)!r}, whose config.json has the model_type {kind!r}; allowed: "
            f"{LineartimeConfig.model_type!r}"
        )
    return config


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError(
            f"`folder` is {str(folder)!r}, whose {name} cannot be read ({reason}); allowed: a folder of "
            "python -m fairseq_plugin.export_hf"
        ) from error
    return content


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, which may be in several files."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():  # transformers leaves an old index behind
        shards = _read_json(folder, INDEX).get("weight_map")
        names = sorted({Path(str(name)).name for name in (shards.values() if isinstance(shards, dict) else ())})
    return {name: x for file in names for name, x in read_checkpoint(folder / file).items()}
