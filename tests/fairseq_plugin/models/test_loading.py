"""Checkpoints: all of a file is loaded or nothing, the error says why, no code runs, and options stay with weights."""

import copy
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.ema import EMA
from torch import nn

from common.attention import ATTENTIONS
from fairseq_plugin import FlowformerLanguageModel
from tests.compare import weights
from tests.fairseq_plugin.helpers import checkpoint_files as files
from tests.fairseq_plugin.helpers.kinds import build, load, save

State = dict[str, Any]
PAPER = ("--flow-form", "paper", "--flow-clamp", "inf")


def first(state: State, end: str) -> str:
    return next(name for name in state if name.endswith(end))


def snapshot(model: nn.Module) -> tuple[str, State]:
    return repr(model), {name: x.clone() for name, x in model.state_dict().items()}


#: What is done to a state dict, and what the error says of it.
FAULTS: dict[str, tuple[Callable[[State], Any], str]] = {
    "missing": (lambda x: x.pop(first(x, "out_proj.bias")), r"1 missing \(.*out_proj.bias\)"),
    "too many": (lambda x: x.update({"decoder.more.weight": torch.ones(2)}), "1 not of this model"),
    "shape": (lambda x: x.update({first(x, "out_proj.weight"): torch.ones(3, 3)}), r"1 of other shapes .*\(3, "),
    "no tensor": (lambda x: x.update({first(x, "out_proj.weight"): "text"}), "out_proj.weight a str, not"),
    "nothing": (lambda x: x.clear(), "missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_mlm", "flow_wav2vec2", "flow", "flow_time_series"])
def test_nothing_is_loaded_of_what_does_not_fit(arch: str, fault: str) -> None:
    """A ValueError names model and tensors; tensors, modules and the state dict are unchanged."""
    model, (spoil, reason) = build(arch), FAULTS[fault]
    state = {name: x + 1 for name, x in weights(model.state_dict()).items()}
    spoil(state)
    original, before = dict(state), snapshot(model)
    with pytest.raises(ValueError, match=f"does not fit {type(model).__name__}: .*{reason}.*Nothing was loaded"):
        model.load_state_dict(state)
    after = snapshot(model)
    assert after[0] == before[0] and all(torch.equal(x, before[1][name]) for name, x in after[1].items())
    assert state.keys() == original.keys() and all(state[name] is original[name] for name in original)


#: Architecture | options of the checkpoint | options of the model | what the error or warning says.
DIFFERENT = r"""
flowformer_lm | --lineartime-post-norm | | post-norm model has no decoder.layer_norm: --lineartime-post-norm
flowformer_lm | | --lineartime-post-norm | leave --lineartime-post-norm away
flash_quad_lm | --tokens-per-sample 600 | --tokens-per-sample 200 | --flash-relative-bias rotary
flash_quad_lm | --tokens-per-sample 200 | --tokens-per-sample 600 | 200 tokens: --flash-relative-bias toeplitz
flash_quad_lm | --tokens-per-sample 200 | --tokens-per-sample 300 | for at most 200 tokens
hybrid_lm | --lineartime-layers flow,hedgehog | --lineartime-layers flow | flow,hedgehog in the checkpoint
hybrid | --lineartime-cross-attention linear | --lineartime-cross-attention t2r | linear\*2 in the checkpoint
flowformer_lm | --flow-form paper --flow-clamp inf | --flow-clamp inf | form='paper'.*form='released'
flowformer_lm | --decoder-attention-heads 2 | --decoder-attention-heads 4 | num_heads=2.*num_heads=4
flash_quad_lm | --flash-relative-bias rotary | --flash-relative-bias rotary --tokens-per-sample 96 | divisor=40.*=96
linear_lm | --lineartime-reset-at-eos | | reset_at_eos=True.*reset_at_eos=False
linear_lm | | --lineartime-reset-at-eos | do not say.*reset_at_eos=True
flow | --lineartime-cross-attention linear | --lineartime-cross-attention favor | linear.*favor
flow | | --lineartime-cross-attention linear | do not say.*attention='linear'
flow_classifier | --pooling mean | | pooling='mean'.*pooling='first'
flow_classifier | | --classifier-style arena | classifier_style='roberta'.*classifier_style='arena'
""".strip().splitlines()


@pytest.mark.parametrize("row", DIFFERENT)
def test_weights_of_other_options_are_refused_or_a_warning(row: str) -> None:
    """An error if their shapes differ, otherwise a warning; with equal options neither."""
    arch, stored, built, said = (part.strip() for part in row.split("|"))
    state, model = build(arch, *stored.split()).state_dict(), build(arch, *built.split())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model.load_state_dict(state)
            found = "\n".join(str(x.message) for x in caught)
        except ValueError as error:
            found = str(error)
        assert re.search(said, found), found
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(arch, *stored.split()).load_state_dict(state)


def _half_average(model: nn.Module) -> State:
    average = EMA(copy.deepcopy(model).half(), EMAConfig(store_ema=True, ema_decay=0.999, ema_fp32=True))
    average.step(copy.deepcopy(model).half(), updates=1)
    return dict(average.fp32_params)


def _average(model: nn.Module) -> State:
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.999))
    average.step(model, updates=1)
    return average.get_model().state_dict()


def _mean(model: nn.Module) -> State:
    """As in fairseq's scripts/average_checkpoints.py."""
    return {name: (x + x) / 2 if x.is_floating_point() else (x + x) // 2 for name, x in model.state_dict().items()}


#: What fairseq or a user does to weights before they are saved.
WAYS: dict[str, Callable[[nn.Module], State]] = {
    "averaged checkpoints": _mean,
    "--store-ema": _average,
    "--store-ema --ema-fp32": _half_average,
    "--fp16": lambda model: copy.deepcopy(model).half().state_dict(),
    "--bf16": lambda model: copy.deepcopy(model).bfloat16().state_dict(),
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)).state_dict(),
}


@pytest.mark.parametrize("way", WAYS)
def test_options_stay_with_weights(way: str) -> None:
    state = WAYS[way](build("flowformer_lm", *PAPER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("flowformer_lm", *PAPER).load_state_dict(state)
    with pytest.warns(UserWarning, match="form='paper'.*form='released'"):
        build("flowformer_lm", "--flow-clamp", "inf").load_state_dict(state)


def test_another_dictionary_is_named() -> None:
    for arch in ("linear_lm", "flash_mlm"):
        with pytest.raises(ValueError, match="dictionary .*49 .*54"):
            build(arch, words=50).load_state_dict(build(arch, words=45).state_dict())


def test_weights_go_to_the_device_of_the_model() -> None:
    state = build("flowformer_lm").state_dict()
    model = build("flowformer_lm").to("meta")
    model.load_state_dict(state)
    assert {x.device.type for x in weights(model.state_dict()).values()} == {"meta"}


def test_a_head_remembers_what_it_pools_and_the_order_of_its_labels() -> None:
    """A file of version 0.2 does not say it, and RoBERTa's loading, which completes heads, adds no record to it."""

    def classifier(*labels: str) -> nn.Module:
        model = build("flow_classifier", "--pooling", "mean")
        model.labels = list(labels) or None
        model.register_classification_head("labels", 3)
        return model

    state = classifier("good", "bad", "neither").state_dict()
    with pytest.warns(UserWarning, match=r"labels=\['good', 'bad', 'neither'\].*labels=\['bad', 'good', 'neither'\]"):
        classifier("bad", "good", "neither").load_state_dict(state)
    former = {name: x for name, x in classifier().state_dict().items() if "remembered" not in name}
    with pytest.warns(UserWarning, match="do not say which options.*pooling='mean'"):
        classifier().load_state_dict(former)
    new = {name: x for name, x in former.items() if not name.startswith("classification_heads.")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier().load_state_dict(new)


def test_what_is_left_out_and_new_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Heads of RoBERTa, ``strict=False``, and tensors of earlier versions; the final norm of a file of 2018 stays."""

    def said() -> str:
        text = "\n".join(x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING)
        caplog.clear()
        return text

    model, other = build("flash_mlm"), build("flash_mlm")
    other.register_classification_head("labels", num_classes=3)
    model.load_state_dict(other.state_dict())
    assert re.search(r"4 left out \(classification_heads.labels.*; 0 new", said())
    other.load_state_dict(model.state_dict())
    assert re.search(r"0 left out; 4 new \(classification_heads.labels", said())
    model = build("linear_lm")
    state = model.state_dict()
    state["more.weight"] = state.pop("decoder.layers.1.fc2.bias") + 1
    keys = model.load_state_dict(state, strict=False)
    assert keys.missing_keys == ["decoder.layers.1.fc2.bias"] and keys.unexpected_keys == ["more.weight"]
    assert "1 left out (more.weight); 1 new (decoder.layers.1.fc2.bias)" in said()
    old = {name: x + 1 for name, x in weights(model.state_dict()).items() if not name.endswith(".version")}
    modules = repr(model)
    model.load_state_dict(old)
    assert repr(model) == modules and not said()
    model = build("bigbird_mlm")
    state = {name: x for name, x in model.state_dict().items() if not name.endswith("._extra_state")}
    attentions = {name: x for name, x in model.named_modules() if isinstance(x, ATTENTIONS["bigbird"])}
    model.load_state_dict(state | {f"{name}.numbers": x.numbers + 1 for name, x in attentions.items()})
    assert attentions and not said()


class _Attack:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


def _stored(folder: Path, change: Callable[[State], Any]) -> None:
    files.save_model(folder / "c.pt", "cfg", "flowformer_lm")
    state = torch.load(folder / "c.pt")
    change(state)
    torch.save(state, folder / "c.pt")


def _cut(folder: Path) -> None:
    _stored(folder, lambda state: None)
    (folder / "c.pt").write_bytes((folder / "c.pt").read_bytes()[:20000])


BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (_cut, "c.pt' cannot be read, it may be cut short"),
    "empty": (lambda folder: (folder / "c.pt").touch(), "c.pt' cannot be read, it may be cut short"),
    "text": (lambda folder: (folder / "c.pt").write_text("hello"), "c.pt' cannot be read"),
    "code": (lambda folder: _stored(folder, lambda state: state.update(args=_Attack())), "not allowed: posix.system"),
    "no file": (lambda folder: None, "c.pt' is no file"),
    "bare": (
        lambda folder: torch.save(build("flowformer_lm").state_dict(), folder / "c.pt"),
        "holds decoder.version, ",
    ),
    "no weights": (lambda folder: _stored(folder, lambda state: state.pop("model")), "holds args, "),
    "width": (lambda x: _stored(x, lambda y: y["cfg"]["model"].update(decoder_ffn_embed_dim=48)), "6 of other shapes"),
    "layers": (lambda x: _stored(x, lambda y: y["cfg"]["model"].update(decoder_layers=3)), "16 missing"),
    "another model": (lambda x: files.save_model(x / "c.pt", "args", "linear_lm"), "holds 'linear_lm'; allowed for"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(case: str, data_bin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``from_pretrained`` raises a ValueError and runs nothing from the file."""
    monkeypatch.chdir(tmp_path)
    write, reason = BAD_FILES[case]
    write(tmp_path)
    with pytest.raises(ValueError, match=reason) as error:
        FlowformerLanguageModel.from_pretrained(str(tmp_path), "c.pt", data_bin)
    assert "allowed" in str(error.value) and not Path("executed").exists()


def test_arguments_of_from_pretrained(data_bin: str, tmp_path: Path) -> None:
    """Options of fairseq, of the model and of the task are taken; mistyped ones, and folders that are none, refused."""
    files.save_model(tmp_path / "c.pt", "cfg", "flowformer_lm")
    options = {"fp16": False, "dropout": 0.3, "tokens_per_sample": 40, "beam": 2}
    hub = FlowformerLanguageModel.from_pretrained(str(tmp_path), "c.pt", data_bin, **options)
    assert hub.models[0].decoder.dropout_module.p == 0.3 and hub.task.args.tokens_per_sample == 40
    with pytest.warns(UserWarning, match="form='released'.*form='paper'"):
        FlowformerLanguageModel.from_pretrained(str(tmp_path), "c.pt", data_bin, flow_form="paper")
    for given, said in (
        ((str(tmp_path), "c.pt", data_bin, {"flow_clmp": 1.0}), "flow_clmp; allowed: .*flow_clamp"),
        ((str(tmp_path / "c.pt"), "c.pt", data_bin, {}), "model_name_or_path is '.*c.pt'; allowed: a folder"),
        ((str(tmp_path), "c.pt", "/nowhere/at/all", {}), "data_name_or_path is '/nowhere/at/all'; allowed: a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            FlowformerLanguageModel.from_pretrained(*given[:3], **given[3])


def test_an_ensemble_is_read_file_by_file(data_bin: str, tmp_path: Path) -> None:
    for name, arch in (("a.pt", "linear_lm"), ("b.pt", "transformer_lm"), ("c.pt", "softmax_lm")):
        files.save_model(tmp_path / name, "args", arch)
    model = ARCH_MODEL_REGISTRY["linear_lm"]
    hub = model.from_pretrained(str(tmp_path), f"b.pt{os.pathsep}b.pt", data_bin)
    assert [type(x) for x in hub.models] == [model] * 2
    with pytest.raises(ValueError, match="c.pt' holds 'softmax_lm'"):
        model.from_pretrained(str(tmp_path), f"a.pt{os.pathsep}c.pt", data_bin)


def test_an_error_under_fairseqs_commands_names_the_cause(tmp_path: Path) -> None:
    """fairseq's own error, that architectures do not match, has ours as its context."""
    save(tmp_path / "c.pt", "linear_lm", build("linear_lm", words=40).state_dict())
    for overrides, said in (({}, "dictionary .*44 .*64"), ({"decoder_ffn_embed_dim": 48}, r"\(48, 16\)")):
        with pytest.raises(Exception) as raised:
            load(tmp_path / "c.pt", "linear_lm", **overrides)
        assert re.search(said, f"{raised.value.__context__} {raised.value}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_in_full(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: x.to(dtype) for name, x in build("flowformer_lm").state_dict().items()}
    save(tmp_path / "c.pt", "flowformer_lm", state)
    for name, x in load(tmp_path / "c.pt", "flowformer_lm").state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, state[name].float()), name


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "flash_mlm", "hybrid_lm"])
def test_kept_layers_are_those_of_a_deeper_checkpoint(arch: str, tmp_path: Path) -> None:
    """With their own attention, in a stack of several."""
    side = "encoder" if arch.endswith("_mlm") else "decoder"
    layers = (f"--{side}-layers", "3", *(("--lineartime-layers", "flow,softmax,linear") if "hybrid" in arch else ()))
    deep = build(arch, *layers)
    save(tmp_path / "c.pt", arch, deep.state_dict(), *layers)
    pruned = load(tmp_path / "c.pt", arch, **{f"{side}_layers_to_keep": "0,2"})
    stacks = [getattr(x, "decoder", None) or x.encoder.sentence_encoder for x in (pruned, deep)]
    for layer, original in zip(stacks[0].layers, (stacks[1].layers[0], stacks[1].layers[2]), strict=True):
        assert all(torch.equal(x, original.state_dict()[name]) for name, x in layer.state_dict().items())
