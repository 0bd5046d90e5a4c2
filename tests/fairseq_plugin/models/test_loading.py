"""Our checkpoints load completely or not at all, and the error says why."""

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.dataclass.configs import EMAConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.ema import EMA
from fairseq_cli import eval_lm, train
from torch import Tensor, nn

from common.attention import ATTENTIONS
from common.modules.stored_options import is_extra_state
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, build, save, save_model
from tests.fairseq_plugin.helpers.commands import training_command
from tests.fairseq_plugin.helpers.language_models import SMALL, small
from tests.fairseq_plugin.helpers.masked_models import build_masked
from tests.golden.make_fairseq import FOLDER, load
from tests.processes import CHECKOUT, run_program

OUR_OPTIONS = ("daft_no_query", "flash_kernel", "flash_norm", "flow_form", "flow_clamp", "lineartime_post_norm")
EMBEDDING = {"decoder": "decoder.embed_tokens.weight", "encoder": "encoder.sentence_encoder.embed_tokens.weight"}


class _Attack:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


def _model(arch: str) -> nn.Module:
    return build_masked(arch) if arch.endswith("_mlm") else build(arch, *small(arch))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a state dict, without stored options."""
    return {name: x for name, x in model.state_dict().items() if not is_extra_state(name)}


def _snapshot(model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    return repr(model), {name: x.clone() for name, x in model.state_dict().items()}


def _unchanged(model: nn.Module, before: tuple[str, dict[str, Tensor]]) -> bool:
    modules, tensors = _snapshot(model)
    return (
        modules == before[0]
        and tensors.keys() == before[1].keys()
        and all(torch.equal(tensors[name], before[1][name]) for name in tensors)
    )


def _first(state: dict[str, Any], end: str) -> str:
    return next(name for name in state if name.endswith(end))


def _delete(state: dict[str, Any], end: str) -> None:
    del state[_first(state, end)]


def _put(state: dict[str, Any], end: str, value: Any) -> None:
    state[_first(state, end)] = value


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a missing tensor": (lambda state: _delete(state, "out_proj.bias"), r"1 missing \(.*out_proj.bias\)"),
    "one too many": (lambda state: state.update({"decoder.more.weight": torch.ones(2)}), "1 not of this model"),
    "another shape": (
        lambda state: _put(state, "out_proj.weight", torch.ones(3, 3)),
        r"1 of other shapes .*out_proj.weight \(3, ",
    ),
    "no tensor": (lambda state: _put(state, "out_proj.weight", "text"), "out_proj.weight a str, not"),
    "nothing": (lambda state: state.clear(), "missing"),
}
TRANSFORMERS = ("flowformer_lm", "transformer_pp_lm", "daft_conv_lm", "performer_mlm")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arch", TRANSFORMERS)
def test_nothing_is_loaded_of_what_does_not_fit(arch: str, fault: str) -> None:
    """A ValueError names model and tensors; tensors, modules and the state dict are unchanged."""
    model = _model(arch)
    spoil, reason = FAULTS[fault]
    state = {name: x + 1 for name, x in _weights(model).items()}
    spoil(state)
    original, before = dict(state), _snapshot(model)
    with pytest.raises(ValueError, match=f"does not fit {type(model).__name__}: .*{reason}.*Nothing was loaded"):
        model.load_state_dict(state)
    assert _unchanged(model, before)
    assert state.keys() == original.keys() and all(state[name] is original[name] for name in original)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "flash_mlm"])
def test_a_file_without_a_version_keeps_the_final_norm(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    """fairseq treats it as a file from 2018, and would drop the norm."""
    model = _model(arch)
    modules, state = repr(model), {name: x + 1 for name, x in _weights(model).items()}
    (version,) = [name for name in state if name.endswith(".version")]
    del state[version]
    caplog.clear()
    model.load_state_dict(state)
    assert repr(model) == modules
    assert all(torch.equal(x, state[name]) for name, x in _weights(model).items() if name != version)
    assert not _warned(caplog)


def test_averaged_weights_keep_the_final_norm(caplog: pytest.LogCaptureFixture) -> None:
    """--store-ema loads state dicts without a version at every update, which must not log each time."""
    model = build("flowformer_lm", *SMALL)
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    caplog.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.step(model, updates=1)
    assert repr(average.get_model()) == repr(model) and not caplog.records
    norms = [x.decoder.layer_norm.weight for x in (model, average.get_model())]
    assert_close("norm", norms[1], norms[0] - 0.5)


def _warned(caplog: pytest.LogCaptureFixture) -> str:
    """The warnings on the console of a Python without logging configured."""
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def test_heads(caplog: pytest.LogCaptureFixture) -> None:
    """RoBERTa's loading fills in missing heads and drops unknown ones: a warning for either."""
    model, other_model = build_masked("flash_mlm"), build_masked("flash_mlm")
    other_model.register_classification_head("labels", num_classes=3)
    state = other_model.state_dict()
    before = _snapshot(model)
    spoiled = {name: x for name, x in state.items() if not name.endswith("lm_head.bias")}
    with pytest.raises(ValueError, match=r"1 missing \(encoder.lm_head.bias\)"):
        model.load_state_dict(spoiled)
    assert _unchanged(model, before)
    model.load_state_dict(state)
    assert re.search(r"4 left out \(classification_heads.labels.*; 0 new", _warned(caplog))
    caplog.clear()
    other_model.load_state_dict(model.state_dict())
    assert re.search(r"0 left out; 4 new \(classification_heads.labels", _warned(caplog))
    caplog.clear()
    model.args.load_checkpoint_heads = True
    model.load_state_dict(state)
    assert torch.equal(model.classification_heads["labels"].dense.weight, state[_first(state, "labels.dense.weight")])
    assert not _warned(caplog)


def test_tensors_of_earlier_versions_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    """BigBird's buffers in files of version 0.2 are not reported as left out."""
    model = build_masked("bigbird_mlm")
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, ATTENTIONS["bigbird"])}
    state = {name: x for name, x in model.state_dict().items() if not name.endswith("._extra_state")}
    state |= {f"{name}.numbers": attention.numbers + 1 for name, attention in attentions.items()}
    model.load_state_dict(state)
    assert attentions and not _warned(caplog)
    assert all(torch.equal(x.numbers, state[f"{name}.numbers"]) for name, x in attentions.items())
    today = build_masked("bigbird_mlm", seed=2).state_dict()  # nothing is missing if the file has a seed
    model.load_state_dict(today)
    assert model.state_dict().keys() == today.keys() and not _warned(caplog)


def test_what_is_left_out_and_new_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A warning names left-out and new tensors, also with ``strict=False``; none if the file fits."""
    model = build("linear_lm", *SMALL)
    state = model.state_dict()
    model.load_state_dict(state)
    assert not _warned(caplog)
    state["more.weight"] = state.pop("decoder.layers.1.fc2.bias") + 1
    model.load_state_dict(state, strict=False)
    assert "1 left out (more.weight); 1 new (decoder.layers.1.fc2.bias)" in _warned(caplog)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_mlm"])
def test_not_strict(arch: str) -> None:
    """Matching tensors are loaded, unexpected and missing ones are named; wrong shapes are still refused."""
    model = _model(arch)
    before = _snapshot(model)
    state = {name: x + 1 for name, x in _weights(model).items()}
    embedding = EMBEDDING["encoder" if arch.endswith("_mlm") else "decoder"]
    with pytest.raises(ValueError, match="1 of other shapes"):
        model.load_state_dict({**state, "decoder.more": torch.ones(1), embedding: torch.ones(3, 3)}, strict=False)
    assert _unchanged(model, before)
    missing = next(reversed(state))
    del state[missing]
    keys = model.load_state_dict({**state, "more.weight": torch.ones(1)}, strict=False)
    assert keys.missing_keys == [missing] and keys.unexpected_keys == ["more.weight"]
    assert torch.equal(model.state_dict()[embedding], state[embedding])


@pytest.mark.parametrize(
    ("arguments", "stored", "hint"),
    [
        ((), ("--lineartime-post-norm",), r"post-norm model has no decoder.layer_norm: --lineartime-post-norm"),
        (("--lineartime-post-norm",), (), "leave --lineartime-post-norm away"),
    ],
)
def test_the_message_tells_pre_norm_from_post_norm(arguments, stored, hint: str) -> None:
    """The message names the option that fixes it."""
    state = build("flowformer_lm", *SMALL, *stored).state_dict()
    with pytest.raises(ValueError, match=hint):
        build("flowformer_lm", *SMALL, *arguments).load_state_dict(state)


@pytest.mark.parametrize("arch", ["linear_lm", "flash_mlm"])
def test_the_message_tells_another_dictionary(arch: str) -> None:
    """The message names the size of the other dictionary."""
    make = build_masked if arch.endswith("_mlm") else (lambda arch, words: build(arch, *SMALL, words=words))
    with pytest.raises(ValueError, match="dictionary .*49 .*54"):
        make(arch, words=50).load_state_dict(make(arch, words=45).state_dict())


@pytest.mark.parametrize(
    ("arch", "stored", "built", "hint"),
    [
        ("flash_quad_lm", "600", "200", "--flash-relative-bias rotary"),
        ("flash_quad_lm", "200", "600", "200 tokens: --flash-relative-bias toeplitz"),
        ("flash_quad_lm", "200", "300", "for at most 200 tokens"),
        ("flash_quad_mlm", "600", "200", "--flash-relative-bias rotary"),
    ],
)
def test_the_message_tells_the_relative_bias(arch: str, stored: str, built: str, hint: str) -> None:
    """The bias has one form below 512 tokens and another from 512 on, unless an option chooses."""

    def model(tokens: str, *arguments: str) -> nn.Module:
        if arch.endswith("_mlm"):
            return build_masked(arch, "--max-positions", tokens, *arguments)
        return build(arch, *small(arch), "--tokens-per-sample", tokens, *arguments)

    state = model(stored).state_dict()
    with pytest.raises(ValueError, match=f"does not fit .*{hint}"):
        model(built).load_state_dict(state)
    if hint == "--flash-relative-bias rotary":
        model(built, *hint.split()).load_state_dict(state)


def test_args_prune_as_a_configuration_does() -> None:
    """The older format of fairseq for layers to keep."""
    command = ["data", "--task", "language_modeling", "--arch", "flowformer_lm", *SMALL, "--tokens-per-sample", "48"]
    args = options.parse_args_and_arch(options.get_training_parser(), [*command, "--decoder-layers-to-keep", "1"])
    whole, pruned = build("flowformer_lm", *SMALL), build("flowformer_lm", *SMALL, "--decoder-layers", "1")
    pruned.load_state_dict(whole.state_dict(), args=args)
    kept_layer = whole.decoder.layers[1].state_dict()
    assert all(torch.equal(x, kept_layer[name]) for name, x in pruned.decoder.layers[0].state_dict().items())


# The remaining tests are of from_pretrained and commands.

#: Stored models that together have all of the options above; test_golden.py loads the others.
OF_EACH_KIND = ("flowformer_lm", "flash_lm", "daft_conv_lm", "transformer_plus_mlm", "flash_lm_base")
EVERYWHERE = """
import sys; sys.path.insert(0, {checkout!r})
import torch, fairseq_plugin
from fairseq.models import ARCH_MODEL_REGISTRY
for arch in {architectures!r}:
    hub = ARCH_MODEL_REGISTRY[arch].from_pretrained({folder!r}, arch + ".pt", data_name_or_path={folder!r})
    golden = torch.load({folder!r} + "/" + arch + ".pt")["golden"]
    model = hub.models[0] if hasattr(hub, "models") else hub.model
    error = (model(golden["tokens"])[0] - golden["logits"]).norm() / golden["logits"].norm()
    print("LOADED", arch, type(model).__name__, bool(error < 1e-5))
"""


def test_a_new_process_loads_them(tmp_path: Path) -> None:
    """From another folder, with only the plugin imported and none of the tests' modules."""
    script = EVERYWHERE.format(checkout=str(CHECKOUT), architectures=OF_EACH_KIND, folder=str(FOLDER))
    printed = run_program(["-c", script], cwd=str(tmp_path))
    loaded = [line.split()[1:] for line in printed.splitlines() if line.startswith("LOADED")]
    assert loaded == [[arch, ARCH_MODEL_REGISTRY[arch].__name__, "True"] for arch in OF_EACH_KIND]


def _rewritten(arch: str, folder: Path, change: Callable[[Any], None]) -> dict[str, Tensor]:
    """Write the golden checkpoint with other options to ``folder``; returns its tokens and logits."""
    state = torch.load(FOLDER / f"{arch}.pt")
    model = state["cfg"]["model"]
    change(model if isinstance(model, dict) else vars(model))
    torch.save(state, folder / f"{arch}.pt")
    return state["golden"]


@pytest.mark.parametrize("arch", OF_EACH_KIND)
def test_options_of_other_versions(arch: str, tmp_path: Path) -> None:
    """Options missing from the file have their defaults; unknown ones are ignored."""

    def change(model: dict[str, Any]) -> None:
        for name in OUR_OPTIONS:
            model.pop(name, None)
        model["flow_unheard_of"] = model["unheard_of"] = 3

    golden = _rewritten(arch, tmp_path, change)
    with torch.no_grad():
        assert_close("logits", load(arch, tmp_path)(golden["tokens"])[0], golden["logits"])


def test_a_file_of_a_device_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors saved on a GPU load on the CPU."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    golden = _rewritten("flowformer_lm", tmp_path, lambda model: None)
    monkeypatch.undo()
    assert b"cuda:7" in (tmp_path / "flowformer_lm.pt").read_bytes()
    with torch.no_grad():
        assert_close("logits", load("flowformer_lm", tmp_path)(golden["tokens"])[0], golden["logits"])


@pytest.mark.parametrize("device", ["meta", "cuda"] if torch.cuda.is_available() else ["meta"])
def test_weights_go_to_the_device_of_the_model(device: str) -> None:
    """A model moved to a device beforehand loads tensors from the CPU."""
    model = build("flowformer_lm", *SMALL)
    state = {name: x + 1 for name, x in _weights(model).items()}
    model.to(device).load_state_dict(state)
    assert {x.device.type for x in _weights(model).values()} == {device}
    if device == "cuda":
        assert all(torch.equal(x.cpu(), state[name]) for name, x in _weights(model).items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_loads(dtype: torch.dtype, data_bin: str, tmp_path: Path) -> None:
    """fairseq's --fp16 stores half precision; the loaded model has the stored values in float32."""
    model = build("flowformer_lm", *SMALL)
    state = {name: x.to(dtype) for name, x in model.state_dict().items()}
    save(tmp_path / "c.pt", state, "cfg", "flowformer_lm", *SMALL)
    (loaded,) = type(model).from_pretrained(str(tmp_path), "c.pt", data_bin).models
    for name, x in loaded.state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, state[name].float()), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reader", "written", "allowed"),
    [
        # In between may be variants that a recipe or another test has registered.
        ("flowformer_lm", "linear_lm", "'flowformer_lm', .*'transformer_lm'"),
        ("linear_lm", "flowformer_lm_wiki103", "'linear_lm', .*'transformer_lm'"),
        ("flash_lm", "transformer_lm", "'flash_lm'$"),
        ("daft_full_lm", "transformer_lm", "'daft_full_lm'$"),
        ("flash_quad_lm", "flash_lm", "'flash_quad_lm'$"),
    ],
)
def test_another_architecture_is_refused(
    reader: str, written: str, allowed: str, kind: str, data_bin: str, tmp_path: Path
) -> None:
    """The class that loads it refuses; the message names the file and both architectures."""
    save_model(tmp_path / "c.pt", kind, written)
    model = ARCH_MODEL_REGISTRY[reader]
    with pytest.raises(ValueError, match=f"c.pt' holds '{written}'; allowed for {model.__name__}: {allowed}"):
        model.from_pretrained(str(tmp_path), "c.pt", data_bin)


def _stored(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    save_model(folder / "c.pt", "cfg", "flowformer_lm")
    state = torch.load(folder / "c.pt")
    change(state)
    torch.save(state, folder / "c.pt")


def _cut(folder: Path) -> None:
    save_model(folder / "c.pt", "cfg", "flowformer_lm")
    (folder / "c.pt").write_bytes((folder / "c.pt").read_bytes()[:20000])


BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (_cut, "c.pt' cannot be read, it may be cut short"),
    "empty": (lambda folder: (folder / "c.pt").touch(), "c.pt' cannot be read, it may be cut short"),
    "text": (lambda folder: (folder / "c.pt").write_text("hello"), "c.pt' cannot be read"),
    "code": (lambda folder: _stored(folder, lambda state: state.update(args=_Attack())), "not allowed: posix.system"),
    "no file": (lambda folder: None, "c.pt' is no file"),
    "bare": (
        lambda folder: torch.save(build("flowformer_lm", *SMALL).state_dict(), folder / "c.pt"),
        "holds decoder.version, .*, ...; allowed",
    ),
    "no weights": (lambda folder: _stored(folder, lambda state: state.pop("model")), "holds args, "),
    "missing": (lambda folder: _stored(folder, lambda state: _delete(state["model"], "fc2.bias")), "1 missing"),
    "width": (
        lambda folder: _stored(folder, lambda state: state["cfg"]["model"].update(decoder_ffn_embed_dim=48)),
        r"6 of other shapes \(decoder.layers.0.fc1.weight \(64, 32\), not \(48, 32\)",
    ),
    "layers": (
        lambda folder: _stored(folder, lambda state: state["cfg"]["model"].update(decoder_layers=3)),
        "16 missing",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(case: str, data_bin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``from_pretrained`` raises a ValueError and runs nothing from the file."""
    monkeypatch.chdir(tmp_path)
    write, reason = BAD_FILES[case]
    write(tmp_path)
    with pytest.raises(ValueError, match=reason) as error:
        ARCH_MODEL_REGISTRY["flowformer_lm"].from_pretrained(str(tmp_path), "c.pt", data_bin)
    assert "allowed: " in str(error.value)
    assert not Path("executed").exists()


@pytest.mark.parametrize("given", ["nowhere", "c.pt"])
def test_a_folder_that_is_none(given: str, data_bin: str, tmp_path: Path) -> None:
    """A path that does not exist, and the path of the file itself, which is kept."""
    save_model(tmp_path / "c.pt", "cfg", "flowformer_lm")
    with pytest.raises(ValueError, match=f"model_name_or_path is '.*{given}'; allowed: a folder"):
        ARCH_MODEL_REGISTRY["flowformer_lm"].from_pretrained(str(tmp_path / given), "c.pt", data_bin)
    assert torch.load(tmp_path / "c.pt")["cfg"]["model"]["_name"] == "flowformer_lm"


@pytest.mark.parametrize("data", ["/nowhere/at/all", "./nowhere"])
def test_a_data_folder_that_is_none(data: str, tmp_path: Path) -> None:
    """The error names the argument and its value."""
    save_model(tmp_path / "c.pt", "cfg", "flowformer_lm")
    with pytest.raises(ValueError, match=f"data_name_or_path is '.*{data}'; allowed: a folder"):
        ARCH_MODEL_REGISTRY["flowformer_lm"].from_pretrained(str(tmp_path), "c.pt", data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arch", "option", "meant"),
    [
        ("flowformer_lm", {"flow_clmp": 1.0}, "flow_clamp"),
        ("flowformer_lm", {"flash_chunk_size": 8}, "flow_chunk_size"),
        ("linear_lm", {"xyz": 1}, "linear_chunk_size"),
    ],
)
def test_a_mistyped_option_is_refused(
    kind: str, arch: str, option: dict[str, Any], meant: str, data_bin: str, tmp_path: Path
) -> None:
    """The error names it, and suggests close or existing names."""
    save_model(tmp_path / "c.pt", kind, arch)
    with pytest.raises(ValueError, match=f"{next(iter(option))}; allowed: .*{meant}"):
        ARCH_MODEL_REGISTRY[arch].from_pretrained(str(tmp_path), "c.pt", data_bin, **option)


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_fairseq_are_taken(kind: str, data_bin: str, tmp_path: Path) -> None:
    """Options of fairseq's groups, of the model and of the task are accepted."""
    save_model(tmp_path / "c.pt", kind, "flowformer_lm")
    options = {"fp16": False, "dropout": 0.3, "tokens_per_sample": 40, "beam": 2}
    hub = ARCH_MODEL_REGISTRY["flowformer_lm"].from_pretrained(str(tmp_path), "c.pt", data_bin, **options)
    assert hub.models[0].decoder.dropout_module.p == 0.3 and hub.task.args.tokens_per_sample == 40


def test_a_divisor_that_follows_the_length_is_a_warning() -> None:
    """FLASH-Quad divides scores by the longest training length unless an option sets the divisor."""
    rotary = ("--flash-relative-bias", "rotary")
    short, long = (
        build("flash_quad_lm", *small("flash_quad_lm"), *rotary, "--tokens-per-sample", n) for n in ("48", "96")
    )
    with pytest.warns(UserWarning, match="divisor=48.*divisor=96"):
        long.load_state_dict(short.state_dict())


def test_an_ensemble_is_read_file_by_file(data_bin: str, tmp_path: Path) -> None:
    """Each file is checked: another architecture is refused, two of the same are loaded."""
    folder, model = str(tmp_path), ARCH_MODEL_REGISTRY["linear_lm"]
    for name, arch in (("a.pt", "linear_lm"), ("b.pt", "transformer_lm"), ("c.pt", "softmax_lm")):
        save_model(tmp_path / name, "args", arch)
    assert [type(x) for x in model.from_pretrained(folder, f"b.pt{os.pathsep}b.pt", data_bin).models] == [model] * 2
    with pytest.raises(ValueError, match="c.pt' holds 'softmax_lm'"):
        model.from_pretrained(folder, f"a.pt{os.pathsep}c.pt", data_bin)


def _said(command, arguments, monkeypatch: pytest.MonkeyPatch) -> str:
    """The end of a failing command's traceback: its error and the error that caused it."""
    monkeypatch.setattr(sys, "argv", ["fairseq", *arguments])
    with pytest.raises(Exception) as error:
        command.cli_main()
    met = error.value.__context__
    return f"{met}\n{error.value}" if met is not None else str(error.value)


def test_commands_of_fairseq_name_the_cause(data_bin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation with another dictionary or width; training from a post-norm file without its option."""
    path = tmp_path / "c.pt"
    evaluation = [data_bin, "--path", str(path), "--cpu", "--tokens-per-sample", "48"]
    save(path, build("linear_lm", *SMALL, words=40).state_dict(), "cfg", "linear_lm", *SMALL)
    assert re.search("dictionary .*44 .*64", _said(eval_lm, evaluation, monkeypatch))
    save_model(path, "cfg", "linear_lm")
    overrides = ["--model-overrides", "{'decoder_ffn_embed_dim': 48}"]
    assert "fc1.weight (64, 32), not (48, 32)" in _said(eval_lm, [*evaluation, *overrides], monkeypatch)
    save_model(path, "cfg", "transformer_lm")
    training = training_command(data_bin, str(tmp_path / "out"), "flowformer_lm", "--finetune-from-model", str(path))
    training = [argument for argument in training if argument != "--user-dir" and not argument.endswith("_plugin")]
    message = _said(train, training, monkeypatch)
    assert re.search("decoder.layer_norm.*--lineartime-post-norm", message)
    assert message.endswith("please ensure that the architectures match.")
