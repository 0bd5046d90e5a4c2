"""The state of language models after a prompt, in memory and in files: read a long text once, continue it often.

A file is in the safetensors format, so reading it never runs code. It records the models, options, weights and
dictionary that it belongs to, and is refused with others. It is also refused if the digest of its content is wrong.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from common.files.json_files import parse
from common.files.output_files import new_path
from common.files.tensor_files import digest, read_safetensors, save_safetensors

from ..modules.multihead_attention import IncrementalState
from ..modules.named_states import check_named_state, state_of

#: The format name in the metadata of a file.
_FORMAT = "lineartime prompt state 1"
#: The allowed files, for messages.
_ALLOWED = "a file that --save-state or PromptState.save of this version wrote, as it wrote it"
#: Options of fairseq's decoder that affect its results but are not visible in weights or records of options.
_OPTIONS = ("activation_fn", "no_scale_embedding", "no_token_positional_embeddings")
_DECODER_OPTIONS = ("attention_heads", "normalize_before")

#: Identifies the models and the dictionary of a state.
Fingerprint = dict[str, Any]


@dataclass(frozen=True)
class PromptState:
    """The state of language models after a prompt of m tokens.

    ``tokens`` (1 + m,) are the beginning of sentence and the prompt; the models have read all but the last.
    ``scores`` (m,) are their log-probabilities at ``temperature``. ``states`` has the decoding state of one row, by
    module name, for each model of an ensemble. ``read_prompt`` makes a ``PromptState``.
    """

    tokens: Tensor
    scores: Tensor
    temperature: float
    states: Sequence[dict[str, Tensor]]
    maker: Fingerprint

    def __len__(self) -> int:
        """The number of tokens of the prompt, m."""
        return len(self.tokens) - 1

    def save(self, path: str | Path, argument: str = "path") -> None:
        """Write a new file atomically. Its size is that of the states plus eight bytes per token.

        Raises:
            ValueError: ``path``, called ``argument`` in the message, exists.
        """
        tensors = {f"states.{i}.{name}": x for i, state in enumerate(self.states) for name, x in state.items()}
        tensors |= {"tokens": self.tokens.int(), "scores": self.scores.float()}
        metadata = {"format": _FORMAT, "temperature": json.dumps(self.temperature), "maker": json.dumps(self.maker)}
        with new_path(Path(path), argument) as new:
            save_safetensors(tensors, new, metadata)

    @classmethod
    def load(
        cls, path: str | Path, models: Sequence[nn.Module], dictionary: Dictionary, argument: str = "path"
    ) -> "PromptState":
        """Read a file of ``save`` for the same ``models`` and ``dictionary``, for example those of a hub interface.

        Raises:
            ValueError: the file is missing, incomplete, damaged or of another format, or belongs to other models,
                options, weights or another dictionary. ``argument`` is the name of ``path`` in messages.
        """
        what = f"{argument} is {path}"
        try:
            tensors, metadata = read_safetensors(Path(path))
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}")
            maker, temperature = parse(metadata["maker"]), float(parse(metadata["temperature"]))
            tokens, scores = tensors.pop("tokens").long(), tensors.pop("scores")
            states: list[dict[str, Tensor]] = [{} for _ in maker["models"]]
            for name, tensor in tensors.items():
                _, number, entry = name.split(".", 2)
                states[int(number)][entry] = tensor
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what}, which is no state of a prompt ({error}); allowed: {_ALLOWED}") from error
        device = next(models[0].parameters()).device
        device_states = [{name: x.to(device) for name, x in state.items()} for state in states]
        state = cls(tokens.to(device), scores.to(device), temperature, device_states, maker)
        state.check(models, dictionary, what)
        return state

    def check(self, models: Sequence[nn.Module], dictionary: Dictionary, what: str) -> None:
        """Raise ValueError unless this is a state of ``models`` and ``dictionary``; messages begin with ``what``."""
        check_fingerprint(self.maker, models, dictionary, what)
        try:
            _check_words(self.tokens, self.scores, len(dictionary))
            for model, state in zip(models, self.states, strict=True):
                check_named_state(model, state, rows=1)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{what}, which is no state of a prompt ({error}); allowed: {_ALLOWED}") from error

    def incremental_state(self, number: int, model: nn.Module, rows: int) -> IncrementalState:
        """The decoding state of ``model``, number ``number`` of the ensemble, repeated for ``rows`` rows."""
        return state_of(model, self.states[number], torch.zeros(rows, dtype=torch.long, device=self.tokens.device))


def fingerprint_of(models: Sequence[nn.Module], dictionary: Dictionary) -> Fingerprint:
    """A fingerprint of ``models`` and ``dictionary``, to compare with that of another state; O(their size)."""
    words = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()
    return {"models": [_model(model) for model in models], "dictionary": words}


def check_fingerprint(maker: Fingerprint, models: Sequence[nn.Module], dictionary: Dictionary, what: str) -> None:
    """Raise ValueError unless ``maker`` is that of ``models`` and ``dictionary``; messages begin with ``what``."""
    current = fingerprint_of(models, dictionary)
    if not _is_fingerprint(maker, current):
        raise ValueError(f"{what}, which does not say of which models it is; allowed: {_ALLOWED}")
    if len(maker["models"]) != len(models):
        raise ValueError(f"{what}, a state of {len(maker['models'])} models; allowed: of {len(models)}")
    for name, stored, expected in _differences(maker, current):
        raise ValueError(f"{what}, a state of another {name} ({stored}); allowed: {expected}, that of the model here")


def _differences(there: Fingerprint, here: Fingerprint) -> Iterator[tuple[str, Any, Any]]:
    """Names and values of differences, the most informative first."""
    if there["dictionary"] != here["dictionary"]:
        yield "dictionary", f"SHA-256 {there['dictionary']}", here["dictionary"]
    for stored, current in zip(there["models"], here["models"]):
        for name, value in current["options"].items():
            if stored["options"].get(name) != value:
                yield name, stored["options"].get(name), value
        if stored["weights"] != current["weights"]:
            yield "model, or of other options of its attention", f"SHA-256 {stored['weights']}", current["weights"]


def _model(model: nn.Module) -> dict[str, Any]:
    """A fingerprint of a model: its class and options, and a digest of weights and records of options."""
    cfg = model.decoder.cfg
    options = {"architecture": type(model).__name__, "precision": str(next(model.parameters()).dtype)}
    options |= {name: _plain(getattr(cfg, name, None)) for name in _OPTIONS}
    options |= {f"decoder_{name}": _plain(getattr(cfg.decoder, name, None)) for name in _DECODER_OPTIONS}
    return {"options": options, "weights": digest(model.state_dict())}


def _is_fingerprint(maker: Any, here: Fingerprint) -> bool:
    """Whether ``maker`` has the same fields as ``here``."""
    if not isinstance(maker, dict) or maker.keys() != here.keys() or not isinstance(maker["models"], list):
        return False
    parts = [maker, *maker["models"]]
    if not all(isinstance(part, dict) and isinstance(part.get("options", {}), dict) for part in parts):
        return False
    return all(part.keys() == here["models"][0].keys() for part in maker["models"])


def _check_words(tokens: Tensor, scores: Tensor, words: int) -> None:
    """Raise ValueError unless ``tokens`` (1 + m,) are below ``words`` and ``scores`` (m,) are finite."""
    if tokens.dim() != 1 or len(tokens) < 2 or scores.shape != (len(tokens) - 1,):
        shapes = f"{tuple(tokens.shape)} and {tuple(scores.shape)}"
        raise ValueError(f"tokens and scores have shapes {shapes}, not (1 + m,) and (m,)")
    if int(tokens.min()) < 0 or int(tokens.max()) >= words:
        raise ValueError(f"tokens are {int(tokens.min())} to {int(tokens.max())}; the model has 0 to {words - 1}")
    if not scores.isfinite().all():
        raise ValueError("a score is not finite")


def _plain(value: Any) -> Any:
    """The plain value of an option, which may be one of fairseq's enumerations."""
    return getattr(value, "value", value)
