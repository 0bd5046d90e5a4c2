"""Folders for transformers: loaded without fairseq, generating what fairseq generates, and read back.

../test_every_door.py goes there and back with every model that the documents train.
"""

import json
import os
import subprocess
import sys
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
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig

import common.huggingface
from common.huggingface import modeling_lineartime
from fairseq_plugin import export_hf, import_hf
from fairseq_plugin.models._configuration import read_stored
from tests.fairseq_plugin.helpers.checkpoint_files import save_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line, tree
from tests.fairseq_plugin.helpers.text import dictionary, padded, tokens

CLASSIFICATION = "--task sentence_prediction --criterion sentence_prediction --num-classes 2 --init-token 0".split()
TRANSLATION = "--task translation --source-lang de --target-lang en --share-all-embeddings".split()
#: Architecture, options, and how the checkpoint is stored, for each of transformers' classes.
CASES: dict[str, tuple[str, list[str], str]] = {
    "AutoModelForCausalLM": (
        "flowformer_lm",
        "--share-decoder-input-output-embed --flow-forget head --flow-short-conv 3 --dropout 0.25".split(),
        "cfg",
    ),
    "AutoModelForMaskedLM": ("flowformer_mlm", ["--task", "masked_lm"], "args"),
    "AutoModelForSequenceClassification": (
        "linear_classifier",
        [*CLASSIFICATION, "--max-positions", "48", "--pooler-dropout", "0.3"],
        "args",
    ),
    "AutoModelForSeq2SeqLM": ("flow", TRANSLATION, "args"),
}
CAUSAL, HALF, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
PLACES = ("data", "encoder_embed_path")
ROOT = Path(common.huggingface.__file__).parents[2]

pytestmark = pytest.mark.usefixtures("plain_pytorch")


class Exported(NamedTuple):
    """A checkpoint, the folder of its dictionaries, its exported folder, and its model in fairseq."""

    checkpoint: Path
    data: Path
    folder: Path
    model: nn.Module

    def load(self, auto: str) -> Any:
        """The model of the folder in transformers."""
        return getattr(transformers, auto).from_pretrained(self.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dictionaries as fairseq-preprocess writes them for each task."""
    folder, labels = tmp_path_factory.mktemp("data"), Dictionary()
    for label in ("bad", "good"):
        labels.add_symbol(label)
    for name in ("dict.txt", "dict.de.txt", "dict.en.txt", "input0/dict.txt", "label/dict.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (labels if "label" in name else dictionary()).save(str(folder / name))
    return folder


@torch.no_grad()
def end_soon(model: nn.Module) -> None:
    """Let ``model`` give the eos a high score, so that texts end by themselves."""
    weights = model.state_dict()
    last = ("decoder.layer_norm.bias", "decoder.layers.1.final_layer_norm.bias")
    bias = next(name for name in last if name in weights)
    direction = torch.ones_like(weights[bias]) * weights[bias].numel() ** -0.5
    weights[bias] += 1.7 * direction
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"):
        if f"{name}.weight" in weights:
            weights[f"{name}.weight"][2] = 1.7 * direction


def changed(path: Path, change: Callable[[dict[str, Any]], Any], target: Path) -> Path:
    """A copy of a checkpoint in which something is changed."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, target)
    return target


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Exported]:
    """Every case, by the name of transformers' class."""
    made = {}
    for name, (arch, arguments, kind) in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        model = save_model(folder / "model.pt", kind, arch, *arguments).eval()
        if hasattr(model, "decoder"):
            end_soon(model)
        state = {**torch.load(folder / "model.pt", weights_only=True), "model": model.state_dict()}
        if name == HALF:
            state["model"] = {x: y.half() if y.is_floating_point() else y for x, y in state["model"].items()}
            model.load_state_dict(state["model"])
        if name == SEQ2SEQ:  # a place on the machine of the training, from which nothing is read again
            state["args"].encoder_embed_path = "/home/user/embeddings"
        torch.save(state, folder / "model.pt")
        export_hf.main([str(folder / "model.pt"), str(folder / "hf"), "--data", str(data)])
        made[name] = Exported(folder / "model.pt", data, folder / "hf", model)
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_folder_goes_back_to_the_same_checkpoint(name: str, exported: dict[str, Exported], tmp_path: Path) -> None:
    """Every tensor in its precision, every option of the model, and the updates; fairseq computes the same."""
    arch, _, kind = CASES[name]
    made, back = exported[name], tmp_path / "back.pt"
    import_hf.main([str(made.folder), str(back)])
    before, after = (torch.load(path, weights_only=True) for path in (made.checkpoint, back))
    assert before["model"].keys() == after["model"].keys()
    for key, x in before["model"].items():
        assert torch.equal(x, after["model"][key]) and x.dtype == after["model"][key].dtype, key
    assert after["optimizer_history"][-1]["num_updates"] == 7
    stored = vars(before["args"]) if kind == "args" else before["cfg"]["model"]
    options = [read_stored(arch, x if isinstance(x, dict) else vars(x)) for x in (stored, after["cfg"]["model"])]
    assert all(options[1].get(key) == value for key, value in options[0].items() if key not in PLACES)
    overrides = {"data": str(made.data), "load_checkpoint_heads": True}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(back)], overrides)
    inputs = (tokens(1, 9), torch.tensor([9]), tokens(1, 5)) if name == SEQ2SEQ else (tokens(1, 9),)
    with torch.no_grad():
        assert torch.equal(made.model(*inputs)[0], model.eval()(*inputs)[0])


def test_a_folder_says_what_it_holds(exported: dict[str, Exported]) -> None:
    """Files, a card with what the checkpoint says, and what a training goes on with; nothing of this machine."""
    made = exported[CAUSAL]
    files = tree(made.folder)
    assert {"config.json", "generation_config.json", "model.safetensors", "modeling_lineartime.py"} < files.keys()
    assert {"README.md", "tokenizer.json", "tokenizer_config.json"} < files.keys()
    card = files["README.md"].decode()
    assert "flowformer_lm" in card and "flow*2" in card and "| updates | 7 |" in card
    assert f"{sum(x.numel() for x in made.model.parameters()):,}" in card
    assert "target_tokenizer/tokenizer.json" in tree(exported[SEQ2SEQ].folder)
    configs = {name: json.loads((x.folder / "config.json").read_text()) for name, x in exported.items()}
    assert configs[CAUSAL]["hidden_dropout"] == 0.25 and configs[CAUSAL]["fairseq"]["task"]["data"] == "."
    assert configs["AutoModelForSequenceClassification"]["classifier_dropout"] == 0.3
    assert configs[HALF]["dtype"] == "float16" and configs[CAUSAL]["dtype"] == "float32"
    assert configs["AutoModelForSequenceClassification"]["id2label"] == {"0": "bad", "1": "good"}
    options = [x for one in configs.values() for name in ("model", "task") for x in one["fairseq"][name].values()]
    assert not [x for x in options if isinstance(x, str) and "/" in x]
    for one in exported.values():
        for path, content in tree(one.folder).items():
            assert str(one.folder.parent).encode() not in content and str(Path.cwd()).encode() not in content, path


def generated(model: nn.Module, beams: int, sample: dict[str, Any], **options: Any) -> list[list[dict[str, Any]]]:
    """Hypotheses of fairseq-generate for each sentence, the best one first."""
    generator = SequenceGenerator([model], dictionary(), beam_size=beams, max_len_b=12, **options)
    return generator.generate([model], sample, bos_token=2, prefix_tokens=sample.get("prefix"))


def without_padding(ids: Tensor) -> list[int]:
    """A row of ids without padding."""
    return [i for i in ids.tolist() if i != 1]


@pytest.mark.parametrize("lenpen", [1.0, 0.5, 2.0])
def test_translations_are_those_of_fairseq_generate(lenpen: float, exported: dict[str, Exported]) -> None:
    """All five hypotheses of sentences of different lengths, and their scores; the folder has fairseq's settings."""
    made = exported[SEQ2SEQ]
    sources = torch.cat([tokens(1, 9), padded(tokens(1, 6, seed=1), 0, 3)])
    sample = {"net_input": {"src_tokens": sources, "src_lengths": sources.ne(1).sum(1)}}
    expected = [x for row in generated(made.model, 5, sample, len_penalty=lenpen) for x in row]
    found = made.load(SEQ2SEQ).generate(
        sources,
        attention_mask=sources.ne(1).long(),
        max_new_tokens=13,
        num_return_sequences=5,
        length_penalty=lenpen,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for i, hypothesis in enumerate(expected):
        assert without_padding(found.sequences[i])[1:] == hypothesis["tokens"].tolist()
        assert abs(float(found.sequences_scores[i]) - float(hypothesis["score"])) < 1e-5
    settings = GenerationConfig.from_pretrained(made.folder)
    # fairseq's 200 tokens or, here, the 40 positions of the decoder, one of which is for the end, which it always adds.
    assert (settings.max_new_tokens, settings.forced_eos_token_id, settings.suppress_tokens) == (40, 2, [1])


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_of_fairseq_interactive(beams: int, exported: dict[str, Exported]) -> None:
    """Prompts from the tokenizer, alone and as the shorter row of a batch, and their continuation."""
    made, tokenizer = exported[CAUSAL], AutoTokenizer.from_pretrained(exported[CAUSAL].folder)
    prompt = tokenizer("w5 w9 w2", return_tensors="pt")
    prefix = prompt.input_ids[:, 1:]
    sample = {"net_input": {"src_tokens": prompt.input_ids}, "prefix": prefix}
    # fairseq's length penalty counts the prompt, too: without a penalty both prefer the same.
    scores = {"normalize_scores": False} if beams > 1 else {}
    expected = generated(made.model, beams, sample, **scores)[0][0]["tokens"].tolist()
    settings = {"num_beams": beams, "forced_eos_token_id": 2, "do_sample": False}
    settings |= {"length_penalty": 0.0, "early_stopping": True} if beams > 1 else {}
    model, longest = made.load(CAUSAL), 13 - prefix.shape[1]
    found = model.generate(**prompt, max_new_tokens=longest, **settings)[0]
    assert without_padding(found)[1:] == expected
    together = tokenizer(["w1 w2 w3 w4 w5 w6", "w5 w9 w2"], return_tensors="pt", padding=True)
    assert without_padding(model.generate(**together, max_new_tokens=longest, **settings)[1])[1:] == expected
    assert GenerationConfig.from_pretrained(made.folder).suppress_tokens == [1]


WITHOUT_FAIRSEQ = """
import sys
from pathlib import Path
sys.modules["fairseq"] = sys.modules["fairseq_plugin"] = None
import torch, transformers
torch.set_num_threads(int(sys.argv[2]))  # sums of matrix products differ by the number of threads
folders = sorted(Path(sys.argv[1]).iterdir())
load = getattr(transformers, folders[0].name).from_pretrained
# Without lineartime, and with somebody else's package of the name of ours, the folder says what it needs.
for here in (None, sys.argv[4]):
    sys.path[:0] = [here] if here else []
    if here is None:
        sys.modules["common"] = None
    try:
        load(folders[0], trust_remote_code=True)
        raise SystemExit("loaded without lineartime")
    except ImportError as error:
        assert str(error).startswith("this model needs the package lineartime"), error
        assert "pip install '.[huggingface]'" in str(error)
    del sys.modules["common"]
sys.path[0] = sys.argv[5]
# The first folder alone shows its own code: that imports lineartime, whose classes then are transformers' choice.
remote = load(folders[0], trust_remote_code=True)
import common.huggingface
from common.huggingface import modeling_lineartime
assert type(remote) not in common.huggingface.AUTO_CLASSES.values()
remote.save_pretrained(folders[0].parent.parent / "again")
again = load(folders[0].parent.parent / "again")
for folder in folders:
    stored = torch.load(Path(sys.argv[3]) / folder.name)
    kind = getattr(transformers, folder.name)
    local = kind.from_pretrained(folder, dtype=torch.float32)
    assert type(local) is common.huggingface.AUTO_CLASSES[kind]
    for model in (local, *((remote, again) if folder == folders[0] else ())):
        with torch.no_grad():
            assert torch.equal(model(**stored["inputs"]).logits, stored["logits"]), folder.name
    print(folder.name)
"""


@torch.no_grad()
def test_every_kind_of_folder_loads_where_fairseq_is_not(exported: dict[str, Exported], tmp_path: Path) -> None:
    """With lineartime, and by ``trust_remote_code=True``; without it, the error says what is missing."""
    for name in ("folders", "expected", "stranger"):
        (tmp_path / name).mkdir()
    (tmp_path / "stranger" / "common.py").touch()
    for name, made in exported.items():
        (tmp_path / "folders" / name).symlink_to(made.folder)
        inputs = {"input_ids": tokens(2, 9), "attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6])}
        inputs |= {"decoder_input_ids": tokens(2, 5)} if name == SEQ2SEQ else {}
        torch.save({"inputs": inputs, "logits": made.load(name)(**inputs).logits}, tmp_path / "expected" / name)
    folders, threads = tmp_path / "folders", torch.get_num_threads()
    where = (folders, threads, tmp_path / "expected", tmp_path / "stranger", ROOT)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", WITHOUT_FAIRSEQ, *map(str, where)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(CASES)
    for kind in common.huggingface.AUTO_CLASSES.values():
        remote = getattr(modeling_lineartime, kind.__name__)
        assert issubclass(remote, kind) and remote.config_class is modeling_lineartime.LineartimeConfig


#: What is changed in a checkpoint, or how the command is called, by a word of the line that refuses it.
#: ../test_every_door.py has other models and tasks, and ../../test_output_places.py places.
REFUSED: dict[str, Callable[[dict[str, Any]], Any] | str] = {
    "transformer_lm": lambda state: state["cfg"]["model"].update(_name="transformer_lm"),
    "fc1.weight": lambda state: state["model"].pop("decoder.layers.1.fc1.weight"),
    "dict.txt": "",
    "--data is": "--data none",
    "--data has dict.txt": "--data no_text",
    "--gpt2-encoder-json": "--data words --bpe gpt2",
    "--sentencepiece-model": "--data words --sentencepiece-model x",
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_counterpart_is_refused(said: str, exported: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made, how = exported[CAUSAL], REFUSED[said]
    Path("words").symlink_to(made.data)
    Path("no_text").mkdir()
    Path("no_text/dict.txt").write_bytes(b"\xff\xfe 3\n")
    changed(made.checkpoint, (lambda state: None) if isinstance(how, str) else how, tmp_path / "model.pt")
    with refused_in_one_line(tmp_path, said):
        export_hf.main(["model.pt", "hf", *(how.split() if isinstance(how, str) else ("--data", "words"))])


def test_symbols_with_the_row_of_the_eos_are_never_generated(exported: dict[str, Exported], tmp_path: Path) -> None:
    """As in a converted GPT-2; a tie would go to the first of them, and the text would not end."""

    def tie(state: dict[str, Any]) -> None:
        for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
            state["model"][name][:4] = state["model"][name][2]

    made = exported[CAUSAL]
    path = changed(made.checkpoint, tie, tmp_path / "model.pt")
    (tmp_path / "hf").mkdir()  # an empty folder is taken
    export_hf.main([str(path), str(tmp_path / "hf"), "--data", str(made.data)])
    assert GenerationConfig.from_pretrained(tmp_path / "hf").suppress_tokens == [0, 1, 3]


def test_weights_that_transformers_has_saved_since_are_read(exported: dict[str, Exported], tmp_path: Path) -> None:
    """In several files, and then in one, beside which transformers leaves the index of files that are gone."""
    model = exported[CAUSAL].load(CAUSAL)
    with torch.no_grad():
        model.decoder.layers[0].fc1.weight.mul_(1.5)
    for i, size in enumerate(("4KB", "1GB")):
        model.save_pretrained(tmp_path / "hf", max_shard_size=size)
        import_hf.main([str(tmp_path / "hf"), str(tmp_path / f"{i}.pt")])
        back = torch.load(tmp_path / f"{i}.pt", weights_only=True)["model"]
        assert all(torch.equal(back[name], x) for name, x in model.state_dict().items())
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()


RUNS, LM = {"decoder_attention_heads": "__import__('os').getcwd()"}, {"_name": "language_modeling"}
#: Other fields of config.json, by a word of the line that refuses it; None is without one.
WRONG_CONFIGS: dict[str, dict[str, Any]] = {
    "999": {"lineartime_version": "999.0"},
    "bert": {"model_type": "bert"},
    "fairseq": {"fairseq": None},
    "'fairseq'": {"fairseq": {"architecture": ["linear_lm"], "model": {}, "task": {}}},
    "options of fairseq": {"fairseq": {"architecture": "linear_lm", "model": {}, "task": {}, "trained": [1]}},
    "transformer_lm": {"fairseq": {"architecture": "transformer_lm", "model": {}, "task": {}}},
    "getcwd": {"fairseq": {"architecture": "linear_lm", "model": RUNS, "task": LM}},
}


@pytest.mark.parametrize("said", [*WRONG_CONFIGS, "fc1.weight", "config.json", "model.safetensors"])
def test_a_folder_that_fairseq_cannot_have_is_refused(said: str, exported: dict, tmp_path: Path) -> None:
    folder, made = tmp_path / "hf", exported[CAUSAL].folder
    folder.mkdir()
    config = {**json.loads((made / "config.json").read_text()), **WRONG_CONFIGS.get(said, {})}
    content = json.dumps({name: x for name, x in config.items() if x is not None})
    (folder / "config.json").write_text("[1" if said == "config.json" else content)
    weights = load_file(made / "model.safetensors")
    if said == "fc1.weight":
        del weights["decoder.layers.1.fc1.weight"]
    if said != "model.safetensors":
        save_file(weights, folder / "model.safetensors")
    with refused_in_one_line(tmp_path, said):
        import_hf.main([str(folder), str(tmp_path / "back.pt")])
