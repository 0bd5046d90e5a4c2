"""Every file format of ours, as its writer creates it, damaged in many ways: an error names it, or nothing changes."""

import dataclasses
import signal
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.files.output_files import check_folder, new_folder
from common.files.tensor_files import save_safetensors
from fairseq_plugin import PromptedLanguageModelingTask, PromptState
from fairseq_plugin.data import episode_folder, series_folder
from fairseq_plugin.data.indexed_sums import load_tokens
from fairseq_plugin.data.pixels import SHAPE_FILE, ImageShape
from fairseq_plugin.data.span_folder import read_span_split
from fairseq_plugin.generation.stream_memory import sealed, unsealed
from fairseq_plugin.loading.safetensors_folder import write_checkpoint
from fairseq_plugin.to_safetensors import write_folder
from tests import damages
from tests.fairseq_plugin.helpers import checkpoint_files
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.pixels import write_pixels
from tests.fairseq_plugin.helpers.spans import write_names
from tests.fairseq_plugin.helpers.text import dictionary, tokens
from timm_plugin.transfer import AttentionTransferTask
from timm_plugin.transfer.training import Settings, train

WORDS = 60
#: Time limit of a reader, which is only exceeded by waiting for a pipe without a writer.
_SECONDS = 60


class Format(NamedTuple):
    """A file in a folder: its writer, its reader, which returns the meaning, and the ways to damage it."""

    file: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]  # relative to the folder
    kinds: tuple[Callable[[bytes], Any], ...] = (damages.of_bytes,)


@cache
def _language_model() -> nn.Module:
    return awake(build_model("linear_lm")).eval()


def _write_prompt(folder: Path) -> None:
    task = PromptedLanguageModelingTask(Namespace(save_state=str(folder / "text")), dictionary(WORDS))
    generator = task.build_generator([_language_model()], Namespace(max_len_a=0, max_len_b=14, beam=1))
    source = torch.cat([torch.tensor([[2]]), tokens(1, 12)], dim=1)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([13])}}
    task.inference_step(generator, [_language_model()], sample)


def _read_prompt(folder: Path) -> PromptState:
    return PromptState.load(folder / "text", [_language_model()], dictionary(WORDS), "--load-state")


def _write_model(folder: Path) -> None:
    checkpoint_files.save_model(folder / "checkpoint.pt", "cfg", "linear_lm")
    dictionary(WORDS).save(str(folder / "words.txt"))
    write_folder(folder / "checkpoint.pt", folder / "words.txt", folder)


def _read_model(folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as target:
        return torch.load(write_checkpoint(folder, Path(target)))


def _write_series(folder: Path) -> None:
    rng = np.random.default_rng(0)
    series = [rng.normal(size=(length, 2)) for length in (3, 5, 4)]
    series_folder.write_folder(folder, {"train": (series, ["a", "b", "a"])})


def _write_episodes(folder: Path) -> None:
    rng = np.random.default_rng(0)
    steps = ((rng.normal(size=(n, 3)), rng.uniform(-1, 1, (n, 2)), rng.normal(size=n)) for n in (3, 4))
    episode_folder.write_folder(folder, {"train": [episode_folder.Episode(*step) for step in steps]}, "toy")


def _read_span(folder: Path) -> list[Any]:
    episodes = read_span_split(folder, "train")
    texts = [[text.tolist() for text in part] for part in (episodes.question_tokens, episodes.document_tokens)]
    return [episodes.questions, texts, episodes.pairs, episodes.spans, episodes.ends]


def _read_pixels(folder: Path) -> list[Any]:
    return [text.tolist() for text in load_tokens(folder / "test", "allowed: images")]


def _task() -> AttentionTransferTask:
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=8, depth=1, embed_dim=8, num_heads=2, num_classes=3)
    return AttentionTransferTask(timm.create_model("vit_tiny_patch16_224", **sizes), "hedgehog")


def _transfer(folder: Path) -> Any:
    """Losses and state of a transfer of one epoch, which runs or is read from its file."""
    task = _task()
    images = [(torch.ones(2, 3, 16, 16), torch.zeros(2))]
    losses = train(task, images, Settings(epochs=1, opt="adamw"), folder / "training.pth", {"data": "ones"})
    return losses, task.own_state()


def _write_marked(folder: Path) -> None:
    with new_folder(folder / "out", "recipes.some") as new:
        (new / "made.txt").write_text("x")


def _read_marked(folder: Path) -> list[str]:
    check_folder(folder / "out", "recipes.some", "--out", whole=True)
    return ["made.txt"]


JSON, ARRAYS = (damages.of_bytes, damages.of_json), (damages.of_bytes, damages.of_arrays)
_read_series = partial(series_folder.read_split, name="train")
_read_episodes = partial(episode_folder.read_split, name="train")
FORMATS = {
    "state of a prompt": Format("text", _write_prompt, _read_prompt),
    "model in a folder": Format("model.safetensors", _write_model, _read_model),
    # Options within it have any type.
    "configuration of a model": Format(
        "config.json", _write_model, _read_model, (*JSON[:1], partial(damages.of_json, nested=False))
    ),
    "description of series": Format("series.json", _write_series, _read_series, JSON),
    "series": Format("train.npz", _write_series, _read_series, ARRAYS),
    "description of episodes": Format("episodes.json", _write_episodes, _read_episodes, JSON),
    "episodes": Format("train.npz", _write_episodes, _read_episodes, ARRAYS),
    "questions": Format("train.json", partial(write_names, counts={"train": 4}), _read_span, JSON),
    "spans": Format("train.npz", partial(write_names, counts={"train": 4}), _read_span, ARRAYS),
    "documents": Format("document/train.bin", partial(write_names, counts={"train": 4}), _read_span),
    "index of documents": Format("document/train.idx", partial(write_names, counts={"train": 4}), _read_span),
    "shape of images": Format(SHAPE_FILE, write_pixels, ImageShape.load, JSON),
    "images": Format("test.bin", write_pixels, _read_pixels),
    "index of images": Format("test.idx", write_pixels, _read_pixels),
    "checksums of images": Format("test.sha256", write_pixels, _read_pixels),
    "unfinished transfer": Format("training.pth", _transfer, _transfer),
    "what a command made": Format("out/.lineartime", _write_marked, _read_marked),
}


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return np.array_equal(found, wanted)
    if dataclasses.is_dataclass(wanted):
        return _same(vars(found), vars(wanted))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[name], x) for name, x in wanted.items())
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return found == wanted


def _is_refused(form: Format, what: str, folder: Path, whole: Any) -> bool:
    """Whether the damaged file is refused, which it must be unless its meaning is unchanged."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{what}: it is still being read"))
    signal.alarm(_SECONDS)
    try:
        content = form.read(folder)
    except (ValueError, OSError) as error:
        message, path = str(error), folder / form.file
        assert "\n" not in message and len(message) < 1000, f"{what}: {message[:2000]}"
        assert "set_int_max_str_digits" not in message, what
        assert any(str(part) in message for part in (path, path.with_suffix(""), path.parent)), f"{what}: {message}"
        return True
    finally:
        signal.alarm(0)
    assert _same(content, whole), f"{what}: {content}"
    return False


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Format, Path, Any]:
    """A format, a folder with its file, and what that means."""
    form, folder = FORMATS[request.param], tmp_path_factory.mktemp("written") / "whole"
    folder.mkdir()
    form.write(folder)
    return form, folder, form.read(folder)


def test_a_damaged_file_is_refused_or_means_the_same(written: tuple[Format, Path, Any]) -> None:
    """In the ways of its format, most of which are refused."""
    form, source, whole = written
    verdicts = []
    for label, damage in (pair for kind in form.kinds for pair in kind((source / form.file).read_bytes())):
        folder = damages.copied(source, source.with_name("damaged"))
        damage(folder / form.file)
        verdicts.append(_is_refused(form, label, folder, whole))
    assert len(verdicts) > 10 and sum(verdicts) > len(verdicts) / 2


@settings(max_examples=15)
@given(data=st.data())
def test_other_bytes_are_refused_or_mean_the_same(written: tuple[Format, Path, Any], data: st.DataObject) -> None:
    form, source, whole = written
    content = data.draw(damages.other_bytes((source / form.file).read_bytes()))
    folder = damages.copied(source, source.with_name("damaged"))
    (folder / form.file).write_bytes(content)
    _is_refused(form, "bytes", folder, whole)


def _without(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: x for name, x in state.items() if part not in name}


def _first(state: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """``state`` with the first of its sums changed."""
    name = next(name for name, x in state.items() if x.is_floating_point() and "layers" in name)
    return {**state, name: change(state[name].clone())}


def _fourth(numbers: Tensor, value: int) -> Tensor:
    return numbers.index_fill(0, torch.tensor(3), value)


#: Changes of a file's tensors.
TENSORS = {
    "a bit of a state": lambda x: _first(x, lambda y: torch.nextafter(y, y + 1)),
    "NaN": lambda x: _first(x, lambda y: y.fill_(torch.nan)),
    "inf": lambda x: _first(x, lambda y: y.fill_(torch.inf)),
    "two rows": lambda x: _first(x, lambda y: torch.cat([y, y])),
    "no row": lambda x: _first(x, lambda y: y[0]),
    "no states": lambda x: _without(x, "states."),
    "an attention less": lambda x: _without(x, "layers.0."),
    "a tensor more": lambda x: {**x, "states.0.nowhere.attn_state.x": torch.zeros(1)},
    "a model more": lambda x: {**x, "states.1.decoder.attn_state.x": torch.zeros(1)},
    "no tokens": lambda x: _without(x, "tokens"),
    "no scores": lambda x: _without(x, "scores"),
    "token 9999": lambda x: {**x, "tokens": _fourth(x["tokens"], 9999)},
    "the token after the last": lambda x: {
        **x,
        "tokens": x["tokens"].index_fill(0, torch.tensor(3), len(dictionary(WORDS))),
    },
    "token -1": lambda x: {**x, "tokens": _fourth(x["tokens"], -1)},
    "another token": lambda x: {**x, "tokens": _fourth(x["tokens"], 5)},
    "shorter tokens": lambda x: {**x, "tokens": x["tokens"][:-1]},
    "shorter scores": lambda x: {**x, "scores": x["scores"][:-1]},
    "scores of NaN": lambda x: {**x, "scores": x["scores"] * torch.nan},
    "tokens in two dimensions": lambda x: {**x, "tokens": x["tokens"][None]},
    "doubles": lambda x: {name: y.double() if y.is_floating_point() else y for name, y in x.items()},
}
#: Changes that are only detected by the digest.
LEGIBLE = ("a bit of a state", "another token", "doubles")


@pytest.mark.parametrize("what", TENSORS)
def test_a_state_of_other_tensors_is_refused_before_anything_is_generated(what: str, tmp_path: Path) -> None:
    """The file has its original digest, none, or a matching one."""
    _write_prompt(tmp_path)
    path = tmp_path / "text"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = TENSORS[what](load_file(path))
    unsigned = {name: text for name, text in about.items() if name != "sha256"}
    writers = [partial(save_file, tensors, path, about), partial(save_file, tensors, path, unsigned)]
    if what not in LEGIBLE:
        writers.append(partial(save_safetensors, tensors, path, unsigned))
    for write in writers:
        write()
        task = PromptedLanguageModelingTask(Namespace(load_state=str(path)), dictionary(WORDS))
        with pytest.raises(ValueError, match=r"^--load-state is .*text.*allowed: [^\n]*$"):
            task.build_generator([_language_model()], Namespace())


STREAMS = {
    "a bit": lambda x: {**x, "state": _first(x["state"], lambda y: torch.nextafter(y, y + 1))},
    "a tensor less": lambda x: {**x, "state": dict(list(x["state"].items())[1:])},
    "another name": lambda x: {**x, "state": {f"x{name}": y for name, y in x["state"].items()}},
    "no tensors": lambda x: {**x, "state": {}},
    "a number for a tensor": lambda x: {**x, "state": {**x["state"], "decoder.attn_state.count": 3}},
    "another step": lambda x: {**x, "step": 1},
    "another row": lambda x: {**x, "row": 1},
    "a text as step": lambda x: {**x, "step": "0"},
    "no digest": lambda x: {name: y for name, y in x.items() if name != "sha256"},
    "a further name": lambda x: {**x, "more": 1},
    "a list": lambda x: [x],
}


@pytest.mark.parametrize("what", STREAMS)
def test_damaged_streams_of_a_checkpoint_are_refused(what: str, tmp_path: Path) -> None:
    """When fairseq loads them, torch itself compares nothing."""
    _write_prompt(tmp_path)
    saved = sealed({"step": 0, "row": 0, "state": _read_prompt(tmp_path).states[0]})
    assert _same(unsealed(saved, "the checkpoint is x.pt"), {n: x for n, x in saved.items() if n != "sha256"})
    with pytest.raises(ValueError, match=r"^the checkpoint is x.pt.*allowed: .*--reset-dataloader[^\n]*$"):
        unsealed(STREAMS[what](saved), "the checkpoint is x.pt")
