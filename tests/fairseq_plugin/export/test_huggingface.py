"""Folders for transformers: written from checkpoints, loaded by transformers, and read back, bit by bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from common.huggingface import AUTO_CLASSES
from fairseq_plugin import export_hf, import_hf
from fairseq_plugin.models._configuration import read_stored
from tests.fairseq_plugin.helpers.checkpoint_files import save, save_model
from tests.fairseq_plugin.helpers.text import dictionary, padded, tokens

TRANSLATION = ("--task", "translation", "--source-lang", "de", "--target-lang", "en")
MASKED = ("--task", "masked_lm")
CLASSIFICATION = (
    *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", "2", "--init-token", "0"),
    *("--max-positions", "48"),
)
SHARED = ("--share-decoder-input-output-embed",)


class Case(NamedTuple):
    """A model, how its checkpoint is stored, and transformers' class for it."""

    arch: str
    arguments: tuple[str, ...] = ()
    kind: str = "cfg"
    auto: str = "AutoModelForCausalLM"


CASES = {
    "flow": Case("flowformer_lm", (*SHARED, "--flow-forget", "head", "--flow-short-conv", "3")),
    "units": Case("flash_lm", ("--flash-query-dim", "8", "--flash-chunk-size", "8"), "args"),
    "masked": Case("flowformer_mlm", MASKED, "args", "AutoModelForMaskedLM"),
    "classifier": Case("linear_classifier", CLASSIFICATION, "args", "AutoModelForSequenceClassification"),
    "translation": Case("flow", (*TRANSLATION, "--share-all-embeddings"), "args", "AutoModelForSeq2SeqLM"),
}


class Exported(NamedTuple):
    """A checkpoint, the folder of its dictionaries, its exported folder, and its model in fairseq."""

    checkpoint: Path
    data: Path
    folder: Path
    model: torch.nn.Module

    def load(self, auto: str) -> Any:
        """The model of the folder in transformers."""
        return getattr(transformers, auto).from_pretrained(self.folder, dtype=torch.float32).eval()


def write_dictionaries(folder: Path) -> Path:
    """Dictionaries as fairseq-preprocess writes them for each task."""
    labels = Dictionary()
    for label in ("bad", "good"):
        labels.add_symbol(label)
    for name in ("dict.txt", "dict.de.txt", "dict.en.txt", "input0/dict.txt", "label/dict.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (labels if "label" in name else dictionary()).save(str(folder / name))
    return folder


@pytest.fixture(autouse=True, scope="module")
def plain_pytorch():
    """Compute without kernels for CPUs, which take seconds to load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINEARTIME_CPU_KERNELS", "0")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of dictionaries."""
    return write_dictionaries(tmp_path_factory.mktemp("data"))


@torch.no_grad()
def end_soon(model: torch.nn.Module, path: Path) -> None:
    """Let ``model`` and the checkpoint at ``path`` give the eos a high score, so that texts end by themselves."""
    weights = model.state_dict()
    last = ("decoder.layer_norm.bias", "decoder.layers.1.final_layer_norm.bias")
    bias = next((name for name in last if name in weights), None)
    if bias is None:
        return
    direction = torch.ones_like(weights[bias]) * weights[bias].numel() ** -0.5
    weights[bias] += 1.7 * direction
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"):
        if f"{name}.weight" in weights:
            weights[f"{name}.weight"][2] = 1.7 * direction
    torch.save({**torch.load(path, weights_only=True), "model": weights}, path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[str], Exported]:
    """A function that exports a case, once."""
    made: dict[str, Exported] = {}

    def make(name: str) -> Exported:
        if name not in made:
            case, folder = CASES[name], tmp_path_factory.mktemp("model")
            model = save_model(folder / "model.pt", case.kind, case.arch, *case.arguments).eval()
            if hasattr(model, "decoder"):
                end_soon(model, folder / "model.pt")
            export_hf.main([str(folder / "model.pt"), str(folder / "hf"), "--data", str(data)])
            made[name] = Exported(folder / "model.pt", data, folder / "hf", model)
        return made[name]

    return make


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, and their bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    """``options`` without one of them."""
    return {key: value for key, value in options.items() if key != name}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_goes_back_to_the_same_checkpoint(name: str, exported, tmp_path: Path) -> None:
    """Every tensor, every option that the model reads, and the updates; fairseq loads it and computes the same."""
    case, made = CASES[name], exported(name)
    back = tmp_path / "back.pt"
    import_hf.main([str(made.folder), str(back)])
    before, after = (torch.load(path, weights_only=True) for path in (made.checkpoint, back))
    assert before["model"].keys() == after["model"].keys()
    for key, x in before["model"].items():
        assert torch.equal(x, after["model"][key]) and x.dtype == after["model"][key].dtype, key
    assert after["optimizer_history"][-1]["num_updates"] == 7
    stored = vars(before["args"]) if case.kind == "args" else before["cfg"]["model"]
    options = [read_stored(case.arch, x if isinstance(x, dict) else vars(x)) for x in (stored, after["cfg"]["model"])]
    assert {name: options[1].get(name) for name in options[0] if name != "data"} == without(options[0], "data")
    overrides = {"data": str(made.data), "load_checkpoint_heads": True}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(back)], overrides)
    source = tokens(1, 9)
    inputs = (source, torch.tensor([9]), tokens(1, 5)) if case.auto.endswith("Seq2SeqLM") else (source,)
    with torch.no_grad():
        assert torch.equal(made.model(*inputs)[0], model.eval()(*inputs)[0])


def test_a_folder_says_what_it_holds(exported) -> None:
    """Its files, nothing of this machine, and a card with what the checkpoint says."""
    made = exported("flow")
    files = tree(made.folder)
    assert {"config.json", "generation_config.json", "model.safetensors", "modeling_lineartime.py"} < files.keys()
    assert {"README.md", "tokenizer.json", "tokenizer_config.json"} < files.keys()
    for path, content in files.items():
        assert str(made.folder.parent).encode() not in content and str(Path.cwd()).encode() not in content, path
    config = json.loads(files["config.json"])
    assert config["model_type"] == "lineartime" and config["is_decoder"] is True
    classes = {auto.__name__: f"modeling_lineartime.{own.__name__}" for auto, own in AUTO_CLASSES.items()}
    assert config["auto_map"] == {"AutoConfig": "modeling_lineartime.LineartimeConfig", **classes}
    assert config["bos_token_id"] == config["eos_token_id"] == 2 and config["pad_token_id"] == 1
    card = files["README.md"].decode()
    assert "flowformer_lm" in card and "flow*2" in card and "| updates | 7 |" in card
    assert f"{sum(x.numel() for x in made.model.parameters()):,}" in card
    assert "target_tokenizer/tokenizer.json" in tree(exported("translation").folder)
    labels = json.loads((exported("classifier").folder / "config.json").read_text())["id2label"]
    assert labels == {"0": "bad", "1": "good"}


def test_half_precision_stays(data: Path, tmp_path: Path) -> None:
    """A checkpoint of --fp16 has weights in half precision, there and back."""
    model = save_model(tmp_path / "model.pt", "cfg", "linear_lm")
    weights = {name: x.half() if x.is_floating_point() else x for name, x in model.state_dict().items()}
    save(tmp_path / "half.pt", weights, "cfg", "linear_lm", *"--decoder-layers 2 --decoder-embed-dim 32".split())
    state = torch.load(tmp_path / "half.pt", weights_only=True)
    state["cfg"] = torch.load(tmp_path / "model.pt", weights_only=True)["cfg"]
    torch.save(state, tmp_path / "half.pt")
    export_hf.main([str(tmp_path / "half.pt"), str(tmp_path / "hf"), "--data", str(data)])
    import_hf.main([str(tmp_path / "hf"), str(tmp_path / "back.pt")])
    back = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert all(torch.equal(x, back[name]) and x.dtype == back[name].dtype for name, x in weights.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"


def generated(model: torch.nn.Module, beams: int, sample: dict[str, Any], **options: Any) -> list[list[dict[str, Any]]]:
    """What fairseq-generate finds: for each sentence its hypotheses, the best one first."""
    generator = SequenceGenerator([model], dictionary(), beam_size=beams, max_len_b=12, **options)
    return generator.generate([model], sample, bos_token=2, prefix_tokens=sample.get("prefix"))


def without_padding(ids: Tensor) -> list[int]:
    """A row of ids without padding."""
    return [i for i in ids.tolist() if i != 1]


@pytest.mark.parametrize("lenpen", [1.0, 0.5, 2.0])
def test_translations_are_those_of_fairseq_generate(lenpen: float, exported) -> None:
    """All five hypotheses of sentences of different lengths, and their scores; the folder has fairseq's settings."""
    made = exported("translation")
    sources = torch.cat([tokens(1, 9), padded(tokens(1, 6, seed=1), 0, 3)])
    lengths = sources.ne(1).sum(1)
    sample = {"net_input": {"src_tokens": sources, "src_lengths": lengths}}
    expected = generated(made.model, 5, sample, len_penalty=lenpen)
    found = made.load("AutoModelForSeq2SeqLM").generate(
        sources,
        attention_mask=sources.ne(1).long(),
        max_new_tokens=13,
        num_return_sequences=5,
        length_penalty=lenpen,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for i, hypothesis in enumerate(x for row in expected for x in row):
        assert without_padding(found.sequences[i])[1:] == hypothesis["tokens"].tolist()
        assert abs(float(found.sequences_scores[i]) - float(hypothesis["score"])) < 1e-5


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_of_fairseq_interactive(beams: int, exported) -> None:
    """Prompts from the tokenizer, and their continuation."""
    made = exported("flow")
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    prompt = tokenizer("w5 w9 w2", return_tensors="pt")
    prefix = prompt.input_ids[:, 1:]
    sample = {"net_input": {"src_tokens": prompt.input_ids}, "prefix": prefix}
    expected = generated(made.model, beams, sample)[0][0]["tokens"].tolist()
    model = made.load("AutoModelForCausalLM")
    # fairseq's length penalty counts the prompt, too: without a penalty both prefer the same.
    if beams > 1:
        expected = generated(made.model, beams, sample, normalize_scores=False)[0][0]["tokens"].tolist()
    settings = {"num_beams": beams, "max_new_tokens": 13 - prefix.shape[1], "forced_eos_token_id": 2}
    settings |= {"length_penalty": 0.0, "early_stopping": True} if beams > 1 else {}
    found = model.generate(**prompt, do_sample=False, **settings)[0]
    assert without_padding(found)[1:] == expected
    assert GenerationConfig.from_pretrained(made.folder).suppress_tokens == [1]


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint in which something is changed."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path.with_name("changed.pt"))
    return path.with_name("changed.pt")


def of_model(name: str) -> Callable[[dict[str, Any]], None]:
    """A change to the architecture ``name``."""
    return lambda state: state["cfg"]["model"].update(_name=name)


WRONG_CHECKPOINTS = {
    "flowformer_time_series": of_model("flowformer_time_series"),
    "flowformer_decision": of_model("flowformer_decision"),
    "transformer_lm": of_model("transformer_lm"),
    "pixel_modeling": lambda state: state["cfg"]["task"].update(_name="pixel_modeling"),
    "fc1.weight": lambda state: state["model"].pop("decoder.layers.1.fc1.weight"),
}


@pytest.mark.parametrize("said", WRONG_CHECKPOINTS)
def test_a_checkpoint_without_a_counterpart_is_refused(said: str, exported, tmp_path: Path) -> None:
    """In one line, and nothing is written."""
    made = exported("flow")
    path = changed(made.checkpoint, WRONG_CHECKPOINTS[said])
    with pytest.raises(SystemExit, match=said) as caught:
        export_hf.main([str(path), str(tmp_path / "hf"), "--data", str(made.data)])
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_missing_dictionaries_and_full_folders_are_refused(exported, tmp_path: Path) -> None:
    """An empty folder is taken."""
    made, target = exported("flow"), tmp_path / "hf"
    adaptive = made.checkpoint.with_name("adaptive.pt")
    save_model(adaptive, "cfg", "linear_lm", "--adaptive-softmax-cutoff", "20,40")
    with pytest.raises(SystemExit, match="--adaptive-softmax-cutoff"):
        export_hf.main([str(adaptive), str(target), "--data", str(made.data)])
    for arguments, said in (
        ([], "dict.txt"),
        (["--data", str(tmp_path / "none")], "--data"),
        (["--data", str(made.data), "--bpe", "gpt2"], "--gpt2-encoder-json"),
        (["--data", str(made.data), "--sentencepiece-model", "x"], "--sentencepiece-model"),
    ):
        with pytest.raises(SystemExit, match=said):
            export_hf.main([str(made.checkpoint), str(target), *arguments])
        assert not list(tmp_path.iterdir())
    target.mkdir()
    export_hf.main([str(made.checkpoint), str(target), "--data", str(made.data)])
    before = tree(target)
    with pytest.raises(SystemExit, match="hf"):
        export_hf.main([str(made.checkpoint), str(target), "--data", str(made.data)])
    assert tree(target) == before == tree(made.folder)


def test_a_dictionary_that_cannot_be_read_is_named(exported, tmp_path: Path) -> None:
    """Not the checkpoint, which is as it should be."""
    (tmp_path / "dict.txt").write_bytes(b"\xff\xfe 3\n")
    with pytest.raises(SystemExit, match="--data has dict.txt, which cannot be read") as caught:
        export_hf.main([str(exported("flow").checkpoint), str(tmp_path / "hf"), "--data", str(tmp_path)])
    assert "\n" not in str(caught.value) and [x.name for x in tmp_path.iterdir()] == ["dict.txt"]


def test_symbols_with_the_row_of_the_eos_are_never_generated(exported, tmp_path: Path) -> None:
    """As in a converted GPT-2; a tie would go to the first of them, and the text would not end."""

    def tie(state: dict[str, Any]) -> None:
        for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
            state["model"][name][:4] = state["model"][name][2]

    made = exported("flow")
    export_hf.main([str(changed(made.checkpoint, tie)), str(tmp_path / "hf"), "--data", str(made.data)])
    assert GenerationConfig.from_pretrained(tmp_path / "hf").suppress_tokens == [0, 1, 3]


def test_weights_that_were_in_several_files_before_are_read_from_one(exported, tmp_path: Path) -> None:
    """transformers leaves the index of the files behind, which no longer exist."""
    model = exported("flow").load("AutoModelForCausalLM")
    model.save_pretrained(tmp_path / "hf", max_shard_size="4KB")
    model.save_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    import_hf.main([str(tmp_path / "hf"), str(tmp_path / "back.pt")])
    back = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    name = "decoder.layers.0.fc1.weight"
    assert torch.equal(back[name], model.state_dict()[name])


def config_with(**fields: Any) -> Callable[[Path], None]:
    """A change of fields in config.json; None removes one."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config = {name: x for name, x in {**config, **fields}.items() if x is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def without_a_tensor(folder: Path) -> None:
    """Remove a tensor."""
    weights = load_file(folder / "model.safetensors")
    del weights["decoder.layers.1.fc1.weight"]
    save_file(weights, folder / "model.safetensors")


RUNS = {"decoder_attention_heads": "__import__('os').getcwd()"}
WRONG_FOLDERS = {
    "999": config_with(lineartime_version="999.0"),
    "bert": config_with(model_type="bert"),
    "fairseq": config_with(fairseq=None),
    "no field 'fairseq'": config_with(fairseq={"architecture": ["linear_lm"], "model": {}, "task": {}}),
    "options of fairseq": config_with(fairseq={"architecture": "linear_lm", "model": {}, "task": {}, "trained": [1]}),
    "transformer_lm": config_with(fairseq={"architecture": "transformer_lm", "model": {}, "task": {}}),
    "getcwd": config_with(fairseq={"architecture": "linear_lm", "model": RUNS, "task": {"_name": "language_modeling"}}),
    "fc1.weight": without_a_tensor,
    "config.json": lambda folder: (folder / "config.json").write_text("[1"),
    "model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("said", WRONG_FOLDERS)
def test_a_folder_that_fairseq_cannot_have_is_refused(said: str, exported, tmp_path: Path) -> None:
    """In one line, and nothing is written."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((exported("flow").folder / name).read_bytes())
    WRONG_FOLDERS[said](folder)
    with pytest.raises(SystemExit, match=said) as caught:
        import_hf.main([str(folder), str(tmp_path / "back.pt")])
    assert "\n" not in str(caught.value) and [x.name for x in tmp_path.iterdir()] == ["hf"]
