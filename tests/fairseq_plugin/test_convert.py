"""Checkpoints of fairseq's own models as a start for ours, read as they are or converted to a file."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_plugin.convert import convert, main
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, save_model
from tests.fairseq_plugin.helpers.commands import run_named, training_command
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import dictionary, tokens
from tests.fairseq_plugin.helpers.transfer import save_teacher

PRE_NORM = "--decoder-normalize-before"
ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-softmax-cutoff 20,40 --tie-adaptive-weights "
    "--tie-adaptive-proj --criterion adaptive_loss"
).split()
CHARACTERS = ("--character-embeddings", "--character-filters", "[(1, 8), (2, 8)]", "--character-embedding-dim", "4")
#: Architecture and options of the stock language models.
STOCK = {
    "pre-norm": ("transformer_lm", PRE_NORM),
    "post-norm": ("transformer_lm",),
    "no final norm": ("transformer_lm", PRE_NORM, "--no-decoder-final-norm"),
    "learned positions": ("transformer_lm", PRE_NORM, "--decoder-learned-pos"),
    "shared embeddings": ("transformer_lm", PRE_NORM, "--share-decoder-input-output-embed"),
    "adaptive": ("transformer_lm", PRE_NORM, *ADAPTIVE),
    "adaptive, not tied": ("transformer_lm", PRE_NORM, *ADAPTIVE[:5], *ADAPTIVE[7:]),
    "other widths": ("transformer_lm", PRE_NORM, "--decoder-input-dim", "16", "--decoder-output-dim", "24"),
    "characters": ("transformer_lm", PRE_NORM, *CHARACTERS),
    "transformer_lm_gpt": ("transformer_lm_gpt",),
}


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    """Inputs of the softmax of the vocabulary; log-probabilities where that is adaptive."""
    out = model(tokens(2, 37))
    adaptive = model.decoder.adaptive_softmax is not None
    return model.get_normalized_probs(out, log_probs=True, sample=None) if adaptive else out[0]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint."""
    path = tmp_path_factory.mktemp("stock") / "stock.pt"
    save_model(path, "cfg", *STOCK["pre-norm"])
    return path


def _loaded(arch: str, folder: Path, file: str, data: str, **options: Any) -> nn.Module:
    """Model of a file, by ``from_pretrained`` of an architecture's class or of fairseq's model."""
    cls = TransformerLanguageModel if arch == "transformer_lm" else ARCH_MODEL_REGISTRY[arch]
    (loaded,) = cls.from_pretrained(str(folder), file, data, **options).models
    loaded.eval()
    return loaded


@pytest.mark.parametrize(("variant", "kind"), [("pre-norm", KINDS[1]), *((variant, KINDS[0]) for variant in STOCK)])
def test_softmax_lm_is_the_stock_model(variant: str, kind: str, data_bin: str, tmp_path: Path) -> None:
    """Weights mean the same, converted or not."""
    save_model(tmp_path / "stock.pt", kind, *STOCK[variant])
    stock = _loaded("transformer_lm", tmp_path, "stock.pt", data_bin)
    converted, transfer = convert(tmp_path / "stock.pt", "softmax_lm")
    torch.save(converted, tmp_path / "ours.pt")
    assert set(transfer.taken) == set(stock.state_dict()) and transfer.new == []
    assert transfer.left_out == ["last_optimizer_state"]
    for file in ("stock.pt", "ours.pt"):
        ours = _loaded("softmax_lm", tmp_path, file, data_bin)
        assert type(ours) is ARCH_MODEL_REGISTRY["softmax_lm"]
        assert_close(file, _logits(ours), _logits(stock), tolerance=1e-5)


def test_weights_are_the_start_of_another_attention(data_bin: str, tmp_path: Path) -> None:
    """Bit by bit, with its options; its parameters are new, which the error says how to add, and all of it learns."""
    stock = save_model(tmp_path / "stock.pt", "cfg", *STOCK["pre-norm"])
    options = {"flow_form": "paper", "flow_phi": "elu+1", "flow_chunk_size": 5}
    torch.save(convert(tmp_path / "stock.pt", "flowformer_lm", options)[0], tmp_path / "flow.pt")
    plain, read = (_loaded("flowformer_lm", tmp_path, "stock.pt", data_bin, **given) for given in ({}, options))
    flow = _loaded("flowformer_lm", tmp_path, "flow.pt", data_bin)
    for model in (flow, plain, read):
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameters[name], x) for name, x in stock.named_parameters())
    assert_close("options of ours", _logits(flow), _logits(read))
    assert (_logits(flow) - _logits(plain)).abs().max() > 1e-3
    with refused_in_one_line(tmp_path, "8 missing", "inner", "python -m fairseq_plugin.convert"):
        _loaded("hedgehog_lm", tmp_path, "stock.pt", data_bin)
    torch.save(convert(tmp_path / "stock.pt", "t2r_lm", {"lineartime_trained_parameters": "new"})[0], tmp_path / "t.pt")
    assert all(x.requires_grad for x in _loaded("t2r_lm", tmp_path, "t.pt", data_bin).parameters())


def test_layers_to_keep(data_bin: str, tmp_path: Path) -> None:
    """Pruned as the stock model is; the converted file keeps every weight, so that other layers may be kept."""
    keep = {"decoder_layers_to_keep": "0,2"}
    save_model(tmp_path / "stock.pt", "args", *STOCK["pre-norm"], "--decoder-layers", "3")
    stock = _loaded("transformer_lm", tmp_path, "stock.pt", data_bin, **keep)
    converted, transfer = convert(tmp_path / "stock.pt", "softmax_lm", keep)
    torch.save(converted, tmp_path / "ours.pt")
    assert all(".layers.1." in name for name in transfer.left_out[:-1]) and len(transfer.left_out) == 17
    assert set(transfer.taken) == set(stock.state_dict())
    for file, options in (("stock.pt", keep), ("ours.pt", {})):
        assert_close(file, _logits(_loaded("softmax_lm", tmp_path, file, data_bin, **options)), _logits(stock))


def test_a_stock_training_is_a_start(data_bin: str, tmp_path: Path) -> None:
    """All weights are read by --finetune-from-model, converted or not; the optimiser's state alone is left out.

    The optimiser of this training has no dataclass.
    """
    stock, converted = str(tmp_path / "stock" / "checkpoint_last.pt"), str(tmp_path / "converted.pt")

    def train(name: str, arch: str, *arguments: str) -> tuple[str, list[str], str]:
        command = training_command(data_bin, str(tmp_path / name), arch, "--dropout", "0", *arguments)
        return "fairseq_cli.train", [*command, "--disable-validation", "--no-epoch-checkpoints"], ""

    still = ("--lr", "0", "--max-update", "1", "--finetune-from-model")
    commands = {
        "stock": train("stock", "transformer_lm", PRE_NORM, "--optimizer", "sgd", "--max-update", "2"),
        "convert": ("fairseq_plugin.convert", [stock, converted, "--arch", "softmax_lm"], ""),
        "linear": train("linear", "linear_lm", *still, stock),
        "softmax": train("softmax", "softmax_lm", *still, converted),
    }
    runs = run_named(tmp_path, commands)
    for name in ("linear", "softmax"):
        before, after = runs.weights("stock"), runs.weights(name)
        assert before.keys() == after.keys() and all(torch.equal(before[x], after[x]) for x in before)
        assert re.search(r"\d+ tensors taken as a starting point; 0 left out; 0 new", runs.outputs[name])
    before, after = runs.stored("stock"), runs.stored("converted.pt")
    assert after.keys() == before.keys() - {"last_optimizer_state"} and after["args"] is None
    assert after["extra_state"]["train_iterator"] == before["extra_state"]["train_iterator"]
    assert "37 tensors taken" in runs.outputs["convert"] and "last_optimizer_state" in runs.outputs["convert"]
    assert not list(tmp_path.glob("*.part"))


#: Arguments of ``convert``, and words of the line that refuses them.
BAD_ARGUMENTS = {
    "--arch flash_lm": ("--arch is 'flash_lm'", "flowformer_lm"),
    "--arch transformer_lm": ("--arch is 'transformer_lm'",),
    "--arch nonsense": ("--arch is 'nonsense'",),
    "--model-overrides {'flow_frm':'paper'}": ("flow_frm", "flow_form"),
    "--model-overrides ['flow_form']": ("--model-overrides is ['flow_form']",),
    "--model-overrides {'flow_form'": ("--model-overrides is",),
    "--model-overrides {'flow_form':'other'}": ("--model-overrides {'flow_form': 'other'}",),
    "--model-overrides {'decoder_attention_heads':5}": ("-heads is 5", "--decoder-embed-dim, 32"),
    "--model-overrides {'decoder_embed_dim':64}": ("FlowformerLanguageModel", "shapes"),
    "--model-overrides {'decoder_layers':3}": ("16 missing (decoder.layers.2",),
    "--model-overrides {'decoder_layers':1}": ("16 not of this model (decoder.layers.1",),
    "--model-overrides {'lineartime_post_norm':True}": ("--lineartime-post-norm",),
    "--arch hedgehog_lm --model-overrides {'decoder_layers_to_keep':'0,1'}": ("decoder_layers_to_keep",),
}


#: What is changed in a stock checkpoint, by words of the line that refuses it. ../test_damaged_files.py damages bytes,
#: and ../test_output_places.py has targets.
BAD_FILES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "holds 'flowformer_lm'": lambda state: state["cfg"]["model"].update(_name="flowformer_lm"),
    "1 missing (decoder.layers.1.fc1.bias)": lambda state: state["model"].pop("decoder.layers.1.fc1.bias"),
    "stock.pt' holds args, model, cfg": lambda state: [state.pop(x) for x in {*state} - {"args", "model", "cfg"}],
}


@pytest.mark.parametrize("case", [*BAD_ARGUMENTS, *BAD_FILES])
def test_bad_arguments_and_files_are_refused(case: str, stock: Path, tmp_path: Path) -> None:
    state = torch.load(stock)
    BAD_FILES.get(case, lambda state: None)(state)
    torch.save(state, tmp_path / "stock.pt")
    arguments, words = (case.split(), BAD_ARGUMENTS[case]) if case in BAD_ARGUMENTS else ((), (case,))
    with refused_in_one_line(tmp_path, *words):
        main([str(tmp_path / "stock.pt"), str(tmp_path / "ours.pt"), *arguments])


@pytest.mark.parametrize(
    ("kind", "arch", "options", "new"),
    [
        ("lm", "t2r_lm", {}, 6),
        ("lm", "hybrid_lm", {"lineartime_layers": "hedgehog*2,softmax"}, 8),
        ("mlm", "hybrid_mlm", {"lineartime_layers": "softmax,lolcats"}, 3),
        ("translation", "hybrid", {"lineartime_layers": "flow,t2r", "lineartime_cross_attention": "hedgehog"}, 12),
    ],
)
def test_new_parameters_are_added(kind: str, arch: str, options: dict, new: int, tmp_path: Path) -> None:
    """Always the same ones, whatever was drawn before, and no draw of the process is; fairseq's are all taken."""
    save_teacher(tmp_path / "stock.pt", kind)
    stored = torch.load(tmp_path / "stock.pt", weights_only=False)["model"]
    one, transfer = convert(tmp_path / "stock.pt", arch, options)
    torch.manual_seed(9)
    before = torch.random.get_rng_state()
    other, _ = convert(tmp_path / "stock.pt", arch, options)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(transfer.new) == new and all(".inner." in name for name in transfer.new)
    assert transfer.left_out == []
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in transfer.new)
    assert all(torch.equal(one["model"][name], x) for name, x in stored.items())


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("softmax", {"_name": "transformer", "encoder": {"embed_dim": 24, "layers": 1}, "decoder": {"layers": 2}}),
        ("softmax", {"_name": "transformer_tiny", "decoder_layers": 1}),
        ("softmax_mlm", {"_name": "roberta", "encoder_layers": 1, "encoder_embed_dim": 24, "max_positions": 40}),
    ],
)
def test_stock_models_that_hydra_trained(arch: str, config: dict[str, Any], stock: Path, tmp_path: Path) -> None:
    """Their configuration, in groups or not, becomes that of ours, whose tensors have the same names and shapes."""
    symbols, config = dictionary(), OmegaConf.create(config)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols, max_positions=lambda: 40)
    model = build_model(config, task)  # which completes the configuration, as in a training
    state = {**torch.load(stock), "model": model.state_dict()}
    state["cfg"]["model"] = OmegaConf.to_container(config)
    torch.save(state, tmp_path / "stock.pt")
    converted, transfer = convert(tmp_path / "stock.pt", arch, {"dropout": 0.25})
    stored = OmegaConf.create(converted["cfg"]["model"], flags={"allow_objects": True})
    ours = build_model(stored, task, from_checkpoint=True)
    assert ours.args.dropout == 0.25 and transfer.left_out == ["last_optimizer_state"] and not transfer.new
    assert stored._name == arch
    shapes = [{name: x.shape for name, x in weights(model.state_dict()).items()} for model in (ours, model)]
    assert shapes[0] == shapes[1]
