"""Checkpoints of fairseq's own ``transformer_lm`` as a start for ours, read as they are or converted to a file."""

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

from fairseq_plugin.convert import convert, main
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, build, save, save_model
from tests.fairseq_plugin.helpers.commands import USER_DIR, NamedRuns, run_named, training_command
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.text import dictionary, tokens
from tests.fairseq_plugin.helpers.transfer import make_pair, make_sample, save_teacher

PRE_NORM = "--decoder-normalize-before"
ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-softmax-cutoff 20,40 --tie-adaptive-weights "
    "--tie-adaptive-proj --criterion adaptive_loss"
).split()
CHARACTERS = ("--character-embeddings", "--character-filters", "[(1, 8), (2, 8)]", "--character-embedding-dim", "4")
#: Architecture and options of the stock models.
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
OURS = ("flowformer_lm", "linear_lm", "softmax_lm")
CLASS = {arch: ARCH_MODEL_REGISTRY[arch] for arch in OURS}


def _logits(model, sequence: torch.Tensor) -> torch.Tensor:
    """What the softmax of the vocabulary is over; log-probabilities where that is adaptive."""
    with torch.no_grad():
        out = model(sequence)
        if model.decoder.adaptive_softmax is not None:
            return model.get_normalized_probs(out, log_probs=True, sample=None)
        return out[0]


def _loaded(model: type, folder: Path, file: str, data: str, **options: Any):
    (loaded,) = model.from_pretrained(str(folder), file, data, **options).models
    loaded.eval()
    return loaded


@pytest.mark.parametrize(("variant", "kind"), [("pre-norm", KINDS[1]), *((variant, KINDS[0]) for variant in STOCK)])
def test_softmax_lm_is_the_stock_model(variant: str, kind: str, data_bin: str, tmp_path: Path) -> None:
    """Weights mean the same: with softmax attention, the outputs are those of the stock model, converted or not."""
    save_model(tmp_path / "stock.pt", kind, *STOCK[variant])
    stock = _loaded(TransformerLanguageModel, tmp_path, "stock.pt", data_bin)
    converted, transfer = convert(tmp_path / "stock.pt", "softmax_lm")
    torch.save(converted, tmp_path / "ours.pt")
    assert set(transfer.taken) == set(stock.state_dict()) and transfer.new == []
    assert transfer.left_out == ["last_optimizer_state"]
    sequence = tokens(2, 37)
    for file in ("stock.pt", "ours.pt"):
        ours = _loaded(CLASS["softmax_lm"], tmp_path, file, data_bin)
        assert type(ours) is CLASS["softmax_lm"]
        assert_close(file, _logits(ours, sequence), _logits(stock, sequence), tolerance=1e-5)


@pytest.mark.parametrize(
    ("arch", "variant", "kind"),
    [
        ("linear_lm", "pre-norm", KINDS[0]),
        ("flowformer_lm", "pre-norm", KINDS[1]),
        *(("flowformer_lm", variant, KINDS[0]) for variant in ("post-norm", "adaptive", "transformer_lm_gpt")),
    ],
)
def test_linear_models_begin_with_the_stock_weights(
    arch: str, variant: str, kind: str, data_bin: str, tmp_path: Path
) -> None:
    """Every tensor, and the options: what comes out is what a model built with those options and weights gives."""
    name, *options = STOCK[variant]
    stock = save_model(tmp_path / "stock.pt", kind, name, *options)
    torch.save(convert(tmp_path / "stock.pt", arch)[0], tmp_path / "ours.pt")
    sequence = tokens(2, 37)
    gelu = ["--activation-fn", "gelu"]
    options = gelu if name == "transformer_lm_gpt" else [option for option in options if option != PRE_NORM]
    options += ["--lineartime-post-norm"] if variant == "post-norm" else []
    expected = build(arch, *SMALL, *options, seed=5)
    expected.load_state_dict(stock.state_dict())
    for file in ("stock.pt", "ours.pt"):
        ours = _loaded(CLASS[arch], tmp_path, file, data_bin)
        assert type(ours) is CLASS[arch]
        weights = dict(ours.named_parameters())  # fairseq leaves a buffer of its adaptive modules uninitialised: NaN
        assert all(torch.equal(weights[name], weight) for name, weight in stock.named_parameters())
        assert_close(file, _logits(ours, sequence), _logits(expected, sequence))


def test_layers_to_keep(data_bin: str, tmp_path: Path) -> None:
    """Pruned as the stock model is; the converted file keeps every weight, so that other layers may be kept."""
    save_model(tmp_path / "stock.pt", "args", *STOCK["pre-norm"], "--decoder-layers", "3")
    stock = _loaded(TransformerLanguageModel, tmp_path, "stock.pt", data_bin, decoder_layers_to_keep="0,2")
    converted, transfer = convert(tmp_path / "stock.pt", "softmax_lm", {"decoder_layers_to_keep": "0,2"})
    torch.save(converted, tmp_path / "ours.pt")
    assert all(".layers.1." in name for name in transfer.left_out[:-1]) and len(transfer.left_out) == 17
    assert set(transfer.taken) == set(stock.state_dict())
    sequence = tokens(2, 37)
    expected = _logits(stock, sequence)
    pruned = _loaded(CLASS["softmax_lm"], tmp_path, "stock.pt", data_bin, decoder_layers_to_keep="0,2")
    assert_close("as it is", _logits(pruned, sequence), expected)
    assert_close("converted", _logits(_loaded(CLASS["softmax_lm"], tmp_path, "ours.pt", data_bin), sequence), expected)


def test_options_of_ours(data_bin: str, tmp_path: Path) -> None:
    """Given when a file is read or converted, they are the model's."""
    save_model(tmp_path / "stock.pt", "cfg", *STOCK["pre-norm"])
    options = {"flow_form": "paper", "flow_phi": "elu+1", "flow_chunk_size": 5}
    torch.save(convert(tmp_path / "stock.pt", "flowformer_lm", options)[0], tmp_path / "ours.pt")
    plain = _loaded(CLASS["flowformer_lm"], tmp_path, "stock.pt", data_bin)
    given = [
        _loaded(CLASS["flowformer_lm"], tmp_path, "stock.pt", data_bin, **options),
        _loaded(CLASS["flowformer_lm"], tmp_path, "ours.pt", data_bin),
    ]
    for model in given:
        inner = model.decoder.layers[1].self_attn.inner
        assert repr(inner) == repr(given[0].decoder.layers[0].self_attn.inner)
        assert repr(inner) != repr(plain.decoder.layers[1].self_attn.inner)
    assert_close("logits", _logits(given[0], tokens(2, 20)), _logits(given[1], tokens(2, 20)))


@pytest.fixture(scope="module")
def commands(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """A stock training, whose optimiser has no dataclass, converted, evaluated, and gone on from."""
    folder = tmp_path_factory.mktemp("convert")
    stock, converted = str(folder / "stock" / "checkpoint_last.pt"), str(folder / "converted.pt")
    evaluation = [data_bin, "--user-dir", USER_DIR, "--cpu", "--tokens-per-sample", "48", "--path"]

    def train(name: str, arch: str, *arguments: str):
        command = training_command(data_bin, str(folder / name), arch, "--dropout", "0", *arguments)
        return "fairseq_cli.train", [*command, "--disable-validation", "--no-epoch-checkpoints"], ""

    still = ("--lr", "0", "--max-update", "1", "--finetune-from-model")
    run = {
        "stock": train("stock", "transformer_lm", PRE_NORM, "--optimizer", "sgd", "--max-update", "2"),
        "convert": ("fairseq_plugin.convert", [stock, converted, "--arch", "softmax_lm"], ""),
        "evaluate stock": ("fairseq_cli.eval_lm", [*evaluation, stock], ""),
        "evaluate converted": ("fairseq_cli.eval_lm", [*evaluation, converted], ""),
        "linear": train("linear", "linear_lm", *still, stock),
        "softmax": train("softmax", "softmax_lm", *still, converted),
    }
    return run_named(folder, run)


def test_a_converted_file_is_a_start(commands: NamedRuns) -> None:
    """With softmax attention its loss is the stock loss, to every digit that is printed.

    After --finetune-from-model, of the stock file and of the converted one, weights are those of the stock training.
    """
    stock, ours = (
        re.search(r"Loss \(base 2\): [\d.]+, Perplexity: [\d.]+", commands.outputs[name]).group()
        for name in ("evaluate stock", "evaluate converted")
    )
    assert stock == ours
    files = [commands.folder / run / "checkpoint_last.pt" for run in ("stock", "linear", "softmax")]
    state, *others = (weights(torch.load(file)["model"]) for file in files)
    said = r"LanguageModel: \d+ tensors taken as a starting point; 0 left out; 0 new"
    for name, other in zip(("linear", "softmax"), others):
        assert state.keys() == other.keys() and all(torch.equal(state[x], other[x]) for x in state)
        assert re.search(said, commands.outputs[name])


def test_what_a_converted_file_holds(commands: NamedRuns) -> None:
    """It says so on one line, and holds what fairseq-train's file holds but the optimiser's state."""
    said = (
        r"converted.pt: softmax_lm; 37 tensors taken as a starting point; 1 left out \(last_optimizer_state\); 0 new\n"
    )
    assert re.search(said, commands.outputs["convert"])
    stock = torch.load(commands.folder / "stock" / "checkpoint_last.pt")
    converted = torch.load(commands.folder / "converted.pt")
    assert converted.keys() == stock.keys() - {"last_optimizer_state"} and converted["args"] is None
    assert converted["extra_state"]["train_iterator"] == stock["extra_state"]["train_iterator"]
    assert not list(commands.folder.glob("*.part"))


@pytest.fixture
def stock_file(tmp_path: Path) -> Path:
    """A stock checkpoint."""
    save_model(tmp_path / "stock.pt", "cfg", *STOCK["pre-norm"])
    return tmp_path / "stock.pt"


#: Arguments of ``convert``, and what the line that refuses them says.
BAD_ARGUMENTS = {
    "--arch flash_lm": "arch is 'flash_lm'; allowed: .*flowformer_lm, .*and their sizes",
    "--arch transformer_lm": "arch is 'transformer_lm'; allowed: ",
    "--arch nonsense": "arch is 'nonsense'; allowed: ",
    "--model-overrides {'flow_frm':'paper'}": "model_overrides has flow_frm; allowed: ",
    "--model-overrides ['flow_form']": r"--model-overrides is \['flow_form'\]; allowed",
    "--model-overrides {'flow_form'": "--model-overrides is .*; allowed",
    "--model-overrides {'flow_form':'other'}": "with --model-overrides {'flow_form': 'other'} has",
    "--model-overrides {'decoder_attention_heads':5}": "-heads is 5; allowed: .*--decoder-embed-dim, 32",
    "--model-overrides {'decoder_embed_dim':64}": "does not fit FlowformerLanguageModel: .* of other shapes",
    "--model-overrides {'decoder_layers':3}": r"16 missing \(decoder.layers.2",
    "--model-overrides {'decoder_layers':1}": r"16 not of this model \(decoder.layers.1",
    "--model-overrides {'lineartime_post_norm':True}": "leave --lineartime-post-norm away",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(stock_file: Path, arguments: str) -> None:
    """On one line that names the argument, what was given and what is allowed; nothing is written."""
    with pytest.raises(SystemExit, match=f"^python -m fairseq_plugin.convert: .*{BAD_ARGUMENTS[arguments]}"):
        main([str(stock_file), str(stock_file.parent / "ours.pt"), *arguments.split()])
    assert [path.name for path in stock_file.parent.iterdir()] == ["stock.pt"]


def _changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write what ``change`` makes of a stock checkpoint, or the checkpoint that it has changed."""
    save_model(path, "cfg", *STOCK["pre-norm"])
    state = torch.load(path)
    torch.save(change(state) or state, path)


#: What writes a bad file, and what the line that refuses it says. ../models/test_loading.py has files that are damaged.
BAD_FILES = {
    "holds 'flowformer_lm'; allowed with --arch flowformer_lm: 'transformer_lm'": lambda path: save_model(
        path, "cfg", "flowformer_lm"
    ),
    r"does not fit FlowformerLanguageModel: 1 missing \(decoder.layers.1.fc1.bias\)": lambda path: _changed(
        path, lambda state: state["model"].pop("decoder.layers.1.fc1.bias") is None
    ),
    "holds args, cfg, model; allowed": lambda path: _changed(
        path, lambda state: {name: state[name] for name in ("args", "cfg", "model")}
    ),
    "cannot be read": lambda path: path.write_text("hello"),
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_bad_files_are_refused(reason: str, tmp_path: Path) -> None:
    """One line that names the file; nothing is written."""
    BAD_FILES[reason](tmp_path / "source.pt")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit, match=f"^python -m fairseq_plugin.convert: .*{reason}"):
        main([str(tmp_path / "source.pt"), str(tmp_path / "target.pt")])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_targets_that_are_refused(stock_file: Path) -> None:
    """Files that are there, the source too, folders, and files in folders that are not there; nothing is left."""
    other, folder, before = stock_file.with_name("other.pt"), stock_file.with_name("folder"), stock_file.read_bytes()
    other.write_text("a user's")
    folder.mkdir()
    for target, said in ((stock_file, "stock.pt.*allowed"), (other, "other.pt.*allowed"), (folder, "folder")):
        with pytest.raises(SystemExit, match=said):
            main([str(stock_file), str(target), "--arch", "linear_lm"])
    with pytest.raises(SystemExit, match="target is .*ours.pt'; allowed"):
        main([str(stock_file), str(folder / "none" / "ours.pt")])
    assert stock_file.read_bytes() == before and other.read_text() == "a user's"
    assert sorted(path.name for path in stock_file.parent.iterdir()) == ["folder", "other.pt", "stock.pt"]


# ---- Attention with parameters of its own, masked models and encoder-decoders


@pytest.mark.parametrize(
    ("kind", "arch", "teacher"),
    [
        ("mlm", "softmax_mlm", ()),
        ("mlm", "softmax_mlm", ("--encoder-normalize-before",)),
        ("translation", "softmax", ("--decoder-normalize-before",)),
    ],
    ids=["roberta", "pre-norm roberta", "transformer"],
)
def test_softmax_models_are_the_stock_models(kind: str, arch: str, teacher: tuple[str, ...], tmp_path: Path) -> None:
    """Converted with softmax attention they give what the stock model gives, padding included."""
    pair = make_pair(tmp_path, kind, arch, teacher, lineartime_trained_parameters="all")
    stock = save_teacher(tmp_path / "again.pt", kind, *teacher)
    sample = make_sample(kind, left=2, right=3)
    with torch.no_grad():
        ours, theirs = (model.eval()(**sample["net_input"])[0] for model in (pair.student, stock))
    real = sample["net_input"].get("prev_output_tokens", sample["net_input"]["src_tokens"]).ne(1)
    assert_close("logits", ours[real], theirs[real], tolerance=1e-5)


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
    """Always the same ones; fairseq's weights are all taken."""
    save_teacher(tmp_path / "stock.pt", kind)
    stored = torch.load(tmp_path / "stock.pt", weights_only=False)["model"]
    before = torch.random.get_rng_state()
    both = [convert(tmp_path / "stock.pt", arch, options) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    (one, transfer), (other, _) = both
    assert len(transfer.new) == new and all(".inner." in name for name in transfer.new)
    assert transfer.left_out == []
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in transfer.new)
    assert all(one["model"][name] is not None and torch.equal(one["model"][name], x) for name, x in stored.items())


def test_a_stock_file_without_what_is_new(data_bin: str, tmp_path: Path) -> None:
    """The error says what adds it; layers that are numbered anew are refused."""
    save_model(tmp_path / "stock.pt", "cfg", *STOCK["pre-norm"])
    with pytest.raises(ValueError, match=r"8 missing .*inner.*python -m fairseq_plugin.convert adds"):
        _loaded(ARCH_MODEL_REGISTRY["hedgehog_lm"], tmp_path, "stock.pt", data_bin)
    with pytest.raises(ValueError, match="decoder_layers_to_keep; allowed with an attention that has parameters"):
        convert(tmp_path / "stock.pt", "hedgehog_lm", {"decoder_layers_to_keep": "0,1"})


def test_all_learns_in_what_is_loaded(data_bin: str, tmp_path: Path) -> None:
    """Whatever the training learned that a checkpoint is of."""
    save_model(tmp_path / "stock.pt", "cfg", *STOCK["pre-norm"])
    torch.save(convert(tmp_path / "stock.pt", "t2r_lm", {"lineartime_trained_parameters": "new"})[0], tmp_path / "t.pt")
    loaded = _loaded(ARCH_MODEL_REGISTRY["t2r_lm"], tmp_path, "t.pt", data_bin)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("softmax", {"_name": "transformer", "encoder": {"embed_dim": 24, "layers": 1}, "decoder": {"layers": 2}}),
        ("softmax", {"_name": "transformer_tiny", "decoder_layers": 1}),
        ("softmax_mlm", {"_name": "roberta", "encoder_layers": 1, "encoder_embed_dim": 24, "max_positions": 40}),
    ],
)
def test_stock_models_that_hydra_trained(arch: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Their configuration, in groups or not, becomes that of ours, whose tensors have the same names and shapes."""
    symbols, config = dictionary(), OmegaConf.create(config)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols, max_positions=lambda: 40)
    stock = build_model(config, task)  # which completes the configuration, as in a training
    state = torch.load(save(tmp_path / "stock.pt", stock.state_dict(), "cfg", *STOCK["pre-norm"]))
    state["cfg"]["model"] = OmegaConf.to_container(config)
    torch.save(state, tmp_path / "stock.pt")
    converted, transfer = convert(tmp_path / "stock.pt", arch, {"dropout": 0.25})
    stored = OmegaConf.create(converted["cfg"]["model"], flags={"allow_objects": True})
    ours = build_model(stored, task, from_checkpoint=True)
    assert ours.args.dropout == 0.25 and transfer.left_out == ["last_optimizer_state"] and not transfer.new
    assert stored._name == arch
    shapes = [{name: x.shape for name, x in weights(model.state_dict()).items()} for model in (ours, stock)]
    assert shapes[0] == shapes[1]
