"""The state of language models after a prompt, in memory and in files: a long text is read once, continued often.

A file is of safetensors, so nothing that is read runs code. It says which models, options, weights and dictionary it
belongs to, and others refuse it; it holds a digest of its content, without which it is refused.
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

from common.output_files import new_path
from common.tensor_files import digest, read_safetensors, save_safetensors

from ..modules.multihead_attention import IncrementalState
from ..modules.named_states import check_named_state, state_of

#: The name of the format in the metadata of a file.
_FORMAT = "lineartime prompt state 1"
#: The files that messages say are allowed.
_ALLOWED = "a file that --save-state or PromptState.save of this version wrote, as it wrote it"
#: Options of fairseq's decoder that change what it computes and that neither weights nor their records show.
_OPTIONS = ("activation_fn", "no_scale_embedding", "no_token_positional_embeddings")
_DECODER_OPTIONS = ("attention_heads", "normalize_before")

#: By which models and dictionary a state was made.
Maker = dict[str, Any]


@dataclass(frozen=True)
class PromptState:
    """Language models after a prompt of m tokens, from the beginning of the sentence on.

    ``tokens`` (1 + m,) are those of the prompt after what begins a sentence, of which the models have read all but the
    last; ``scores`` (m,) their log-probabilities, at ``temperature``. ``states`` has for each model of an ensemble its
    decoding state of one row, by the names of the modules. ``read_prompt`` makes one.
    """

    tokens: Tensor
    scores: Tensor
    temperature: float
    states: Sequence[dict[str, Tensor]]
    maker: Maker

    def __len__(self) -> int:
        """The tokens of the prompt, m."""
        return len(self.tokens) - 1

    def save(self, path: str | Path, argument: str = "path") -> None:
        """Write a new file, whole or not at all. Its size is that of the states, and eight bytes for each token.

        Raises:
            ValueError: there is something at ``path``, which is called ``argument``.
        """
        tensors = {f"states.{i}.{name}": x for i, state in enumerate(self.states) for name, x in state.items()}
        tensors |= {"tokens": self.tokens.int(), "scores": self.scores.float()}
        about = {"format": _FORMAT, "temperature": json.dumps(self.temperature), "maker": json.dumps(self.maker)}
        with new_path(Path(path), argument) as new:
            save_safetensors(tensors, new, about)

    @classmethod
    def load(
        cls, path: str | Path, models: Sequence[nn.Module], dictionary: Dictionary, argument: str = "path"
    ) -> "PromptState":
        """Read a file of ``save`` for the same ``models`` and ``dictionary``, those of a hub interface for example.

        Raises:
            ValueError: no such file, half a file, a damaged one or another's; one of other models, options, weights or
                another dictionary. ``argument`` is what ``path`` is called.
        """
        what = f"{argument} is {path}"
        try:
            tensors, about = read_safetensors(Path(path))
            if about.get("format") != _FORMAT:
                raise ValueError(f"its format is {about.get('format')!r}")
            maker, temperature = json.loads(about["maker"]), float(json.loads(about["temperature"]))
            tokens, scores = tensors.pop("tokens").long(), tensors.pop("scores")
            states: list[dict[str, Tensor]] = [{} for _ in maker["models"]]
            for name, tensor in tensors.items():
                _, number, rest = name.split(".", 2)
                states[int(number)][rest] = tensor
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what}, which is no state of a prompt ({error}); allowed: {_ALLOWED}") from error
        device = next(models[0].parameters()).device
        moved = [{name: x.to(device) for name, x in state.items()} for state in states]
        state = cls(tokens.to(device), scores.to(device), temperature, moved, maker)
        state.check(models, dictionary, what)
        return state

    def check(self, models: Sequence[nn.Module], dictionary: Dictionary, what: str) -> None:
        """Raise ValueError unless this is a state of ``models`` and ``dictionary``; ``what`` begins the message."""
        check_maker(self.maker, models, dictionary, what)
        try:
            _check_words(self.tokens, self.scores, len(dictionary))
            for model, state in zip(models, self.states, strict=True):
                check_named_state(model, state, rows=1)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{what}, which is no state of a prompt ({error}); allowed: {_ALLOWED}") from error

    def incremental_state(self, number: int, model: nn.Module, rows: int) -> IncrementalState:
        """The decoding state of ``model``, the one of this ``number`` in the ensemble, for so many equal rows."""
        return state_of(model, self.states[number], torch.zeros(rows, dtype=torch.long, device=self.tokens.device))


def maker_of(models: Sequence[nn.Module], dictionary: Dictionary) -> Maker:
    """Identify ``models`` and ``dictionary``, to compare with those that another state is of; O(their size)."""
    words = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()
    return {"models": [_model(model) for model in models], "dictionary": words}


def check_maker(maker: Maker, models: Sequence[nn.Module], dictionary: Dictionary, what: str) -> None:
    """Raise ValueError unless ``maker`` are these ``models`` and this ``dictionary``; ``what`` begins the message."""
    here = maker_of(models, dictionary)
    if not _is_maker(maker, here):
        raise ValueError(f"{what}, which does not say of which models it is; allowed: {_ALLOWED}")
    if len(maker["models"]) != len(models):
        raise ValueError(f"{what}, a state of {len(maker['models'])} models; allowed: of {len(models)}")
    for name, there, own in _differences(maker, here):
        raise ValueError(f"{what}, a state of another {name} ({there}); allowed: {own}, that of the model here")


def _differences(there: Maker, here: Maker) -> Iterator[tuple[str, Any, Any]]:
    """Names and values of what is not the same, what says most first."""
    if there["dictionary"] != here["dictionary"]:
        yield "dictionary", f"SHA-256 {there['dictionary']}", here["dictionary"]
    for stored, own in zip(there["models"], here["models"]):
        for name, value in own["options"].items():
            if stored["options"].get(name) != value:
                yield name, stored["options"].get(name), value
        if stored["weights"] != own["weights"]:
            yield "model, or of other options of its attention", f"SHA-256 {stored['weights']}", own["weights"]


def _model(model: nn.Module) -> dict[str, Any]:
    """Identify what a model computes: its class and options, and a digest of weights and records of options."""
    cfg = model.decoder.cfg
    options = {"architecture": type(model).__name__, "precision": str(next(model.parameters()).dtype)}
    options |= {name: _plain(getattr(cfg, name, None)) for name in _OPTIONS}
    options |= {f"decoder_{name}": _plain(getattr(cfg.decoder, name, None)) for name in _DECODER_OPTIONS}
    return {"options": options, "weights": digest(model.state_dict())}


def _is_maker(maker: Any, here: Maker) -> bool:
    """Whether ``maker`` has the fields that ``here`` has."""
    if not isinstance(maker, dict) or maker.keys() != here.keys() or not isinstance(maker["models"], list):
        return False
    parts = [maker, *maker["models"]]
    if not all(isinstance(part, dict) and isinstance(part.get("options", {}), dict) for part in parts):
        return False
    return all(part.keys() == here["models"][0].keys() for part in maker["models"])


def _check_words(tokens: Tensor, scores: Tensor, words: int) -> None:
    """Raise ValueError unless ``tokens`` (1 + m,) are numbers of ``words`` words, with finite ``scores`` (m,)."""
    if tokens.dim() != 1 or len(tokens) < 2 or scores.shape != (len(tokens) - 1,):
        shapes = f"{tuple(tokens.shape)} and {tuple(scores.shape)}"
        raise ValueError(f"tokens and scores have shapes {shapes}, not (1 + m,) and (m,)")
    if int(tokens.min()) < 0 or int(tokens.max()) >= words:
        raise ValueError(f"tokens are {int(tokens.min())} to {int(tokens.max())}; the model has 0 to {words - 1}")
    if not scores.isfinite().all():
        raise ValueError("a score is not finite")


def _plain(value: Any) -> Any:
    """Without fairseq's enumerations."""
    return getattr(value, "value", value)
