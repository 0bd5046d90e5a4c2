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
CAUSAL, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
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
def end_soon(model: nn.Module, path: Path) -> None:
    """Let ``model`` and the checkpoint at ``path`` give the eos a high score, so that texts end by themselves."""
    weights = model.state_dict()
    last = ("decoder.layer_norm.bias", "decoder.layers.1.final_layer_norm.bias")
    bias = next(name for name in last if name in weights)
    direction = torch.ones_like(weights[bias]) * weights[bias].numel() ** -0.5
    weights[bias] += 1.7 * direction
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"):
        if f"{name}.weight" in weights:
            weights[f"{name}.weight"][2] = 1.7 * direction
    torch.save({**torch.load(path, weights_only=True), "model": weights}, path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Exported]:
    """Every case, by the name of transformers' class."""
    made = {}
    for name, (arch, arguments, kind) in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        model = save_model(folder / "model.pt", kind, arch, *arguments).eval()
        if hasattr(model, "decoder"):
            end_soon(model, folder / "model.pt")
        export_hf.main([str(folder / "model.pt"), str(folder / "hf"), "--data", str(data)])
        made[name] = Exported(folder / "model.pt", data, folder / "hf", model)
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_folder_goes_back_to_the_same_checkpoint(name: str, exported: dict[str, Exported], tmp_path: Path) -> None:
    """Every tensor, every option that the model reads, and the updates; fairseq loads it and computes the same."""
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
    assert all(options[1].get(key) == value for key, value in options[0].items() if key != "data")
    overrides = {"data": str(made.data), "load_checkpoint_heads": True}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(back)], overrides)
    inputs = (tokens(1, 9), torch.tensor([9]), tokens(1, 5)) if name == SEQ2SEQ else (tokens(1, 9),)
    with torch.no_grad():
        assert torch.equal(made.model(*inputs)[0], model.eval()(*inputs)[0])


def test_a_folder_says_what_it_holds(exported: dict[str, Exported]) -> None:
    """Its files, a card with what the checkpoint says, and what a training goes on with; nothing of this machine."""
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
    assert configs["AutoModelForSequenceClassification"]["id2label"] == {"0": "bad", "1": "good"}
    options = [x for one in configs.values() for name in ("model", "task") for x in one["fairseq"][name].values()]
    assert not [x for x in options if isinstance(x, str) and "/" in x]
    for one in exported.values():
        for path, content in tree(one.folder).items():
            assert str(one.folder.parent).encode() not in content and str(Path.cwd()).encode() not in content, path


def test_a_checkpoint_of_half_precision_stays_one(data: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model.pt", "cfg", "linear_lm")
    weights = {name: x.half() if x.is_floating_point() else x for name, x in model.state_dict().items()}
    torch.save({**torch.load(tmp_path / "model.pt", weights_only=True), "model": weights}, tmp_path / "model.pt")
    export_hf.main([str(tmp_path / "model.pt"), str(tmp_path / "hf"), "--data", str(data)])
    import_hf.main([str(tmp_path / "hf"), str(tmp_path / "back.pt")])
    back = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert all(torch.equal(x, back[name]) and x.dtype == back[name].dtype for name, x in weights.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"


def generated(model: nn.Module, beams: int, sample: dict[str, Any], **options: Any) -> list[list[dict[str, Any]]]:
    """What fairseq-generate finds: for each sentence its hypotheses, the best one first."""
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
# The first folder alone shows its own code: that imports lineartime, whose classes then are transformers' choice.
assert "common" not in sys.modules
remote = getattr(transformers, folders[0].name).from_pretrained(folders[0], trust_remote_code=True)
import common.huggingface
from common.huggingface import modeling_lineartime
assert type(remote) not in common.huggingface.AUTO_CLASSES.values()
remote.save_pretrained(folders[0].parent.parent / "again")
again = getattr(transformers, folders[0].name).from_pretrained(folders[0].parent.parent / "again")
for folder in folders:
    stored = torch.load(Path(sys.argv[3]) / folder.name)
    kind = getattr(transformers, folder.name)
    local = kind.from_pretrained(folder)
    assert type(local) is common.huggingface.AUTO_CLASSES[kind]
    for model in (local, *((remote, again) if folder == folders[0] else ())):
        with torch.no_grad():
            assert torch.equal(model(**stored["inputs"]).logits, stored["logits"]), folder.name
    print(folder.name)
"""


def run(code: str, *arguments: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, which costs seconds, with ``path`` to import from and nothing to download."""
    environment = {**os.environ, "HF_HOME": str(cwd / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


@torch.no_grad()
def test_every_kind_of_folder_loads_where_fairseq_is_not(exported: dict[str, Exported], tmp_path: Path) -> None:
    """With lineartime, and by ``trust_remote_code=True``."""
    for name in ("folders", "expected"):
        (tmp_path / name).mkdir()
    for name, made in exported.items():
        (tmp_path / "folders" / name).symlink_to(made.folder)
        inputs = {"input_ids": tokens(2, 9), "attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6])}
        inputs |= {"decoder_input_ids": tokens(2, 5)} if name == SEQ2SEQ else {}
        torch.save({"inputs": inputs, "logits": made.load(name)(**inputs).logits}, tmp_path / "expected" / name)
    where = (str(tmp_path / "folders"), str(torch.get_num_threads()), str(tmp_path / "expected"))
    done = run(WITHOUT_FAIRSEQ, *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(CASES)
    for kind in common.huggingface.AUTO_CLASSES.values():
        remote = getattr(modeling_lineartime, kind.__name__)
        assert issubclass(remote, kind) and remote.config_class is modeling_lineartime.LineartimeConfig


@pytest.mark.parametrize("another", [False, True])
def test_without_lineartime_a_folder_says_what_it_needs(another: bool, exported: dict, tmp_path: Path) -> None:
    """Somebody else's package may have the name of ours."""
    folder = str(exported[CAUSAL].folder)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)"
    if another:
        (tmp_path / "common.py").touch()
    else:
        code = f"import sys; sys.modules['common'] = None; {code}"
    last = run(code, cwd=tmp_path, path=tmp_path).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this model needs the package lineartime"), last
    assert "pip install '.[huggingface]'" in last


def changed(path: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a checkpoint in ``folder`` in which something is changed."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, folder / "changed.pt")
    return folder / "changed.pt"


def of_model(name: str) -> Callable[[dict[str, Any]], None]:
    """A change to the architecture ``name``."""
    return lambda state: state["cfg"]["model"].update(_name=name)


#: What is changed in a checkpoint, by a word of the line that refuses it.
WRONG_CHECKPOINTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "flowformer_time_series": of_model("flowformer_time_series"),
    "flowformer_decision": of_model("flowformer_decision"),
    "transformer_lm": of_model("transformer_lm"),
    "pixel_modeling": lambda state: state["cfg"]["task"].update(_name="pixel_modeling"),
    "fc1.weight": lambda state: state["model"].pop("decoder.layers.1.fc1.weight"),
}


@pytest.mark.parametrize("said", WRONG_CHECKPOINTS)
def test_a_checkpoint_without_a_counterpart_is_refused(said: str, exported: dict, tmp_path: Path) -> None:
    made = exported[CAUSAL]
    path = changed(made.checkpoint, tmp_path, WRONG_CHECKPOINTS[said])
    with refused_in_one_line(tmp_path, said):
        export_hf.main([str(path), str(tmp_path / "hf"), "--data", str(made.data)])


def test_bad_arguments_and_places_are_refused(exported: dict[str, Exported], tmp_path: Path) -> None:
    """An empty folder is taken, and what is in one that is not empty stays."""
    made, target, no_text = exported[CAUSAL], str(tmp_path / "hf"), tmp_path / "no text"
    no_text.mkdir()
    (no_text / "dict.txt").write_bytes(b"\xff\xfe 3\n")
    data = ["--data", str(made.data)]
    adaptive = tmp_path / "adaptive.pt"
    save_model(adaptive, "cfg", "linear_lm", "--adaptive-softmax-cutoff", "20,40")
    with refused_in_one_line(tmp_path, "--adaptive-softmax-cutoff"):
        export_hf.main([str(adaptive), target, *data])
    for arguments, said in (
        ([], "dict.txt"),
        (["--data", str(tmp_path / "none")], "--data"),
        (["--data", str(no_text)], "--data has dict.txt"),
        ([*data, "--bpe", "gpt2"], "--gpt2-encoder-json"),
        ([*data, "--sentencepiece-model", "x"], "--sentencepiece-model"),
    ):
        with refused_in_one_line(tmp_path, said):
            export_hf.main([str(made.checkpoint), target, *arguments])
    Path(target).mkdir()
    export_hf.main([str(made.checkpoint), target, *data])
    assert tree(Path(target)) == tree(made.folder)
    with refused_in_one_line(tmp_path, "hf"):
        export_hf.main([str(made.checkpoint), target, *data])


def test_symbols_with_the_row_of_the_eos_are_never_generated(exported: dict[str, Exported], tmp_path: Path) -> None:
    """As in a converted GPT-2; a tie would go to the first of them, and the text would not end."""

    def tie(state: dict[str, Any]) -> None:
        for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
            state["model"][name][:4] = state["model"][name][2]

    made = exported[CAUSAL]
    path = changed(made.checkpoint, tmp_path, tie)
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
LM = {"_name": "language_modeling"}
#: What is changed in a folder, by a word of the line that refuses it.
WRONG_FOLDERS: dict[str, Callable[[Path], Any]] = {
    "999": config_with(lineartime_version="999.0"),
    "bert": config_with(model_type="bert"),
    "fairseq": config_with(fairseq=None),
    "'fairseq'": config_with(fairseq={"architecture": ["linear_lm"], "model": {}, "task": {}}),
    "options of fairseq": config_with(fairseq={"architecture": "linear_lm", "model": {}, "task": {}, "trained": [1]}),
    "transformer_lm": config_with(fairseq={"architecture": "transformer_lm", "model": {}, "task": {}}),
    "getcwd": config_with(fairseq={"architecture": "linear_lm", "model": RUNS, "task": LM}),
    "fc1.weight": without_a_tensor,
    "config.json": lambda folder: (folder / "config.json").write_text("[1"),
    "model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("said", WRONG_FOLDERS)
def test_a_folder_that_fairseq_cannot_have_is_refused(said: str, exported: dict, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((exported[CAUSAL].folder / name).read_bytes())
    WRONG_FOLDERS[said](folder)
    with refused_in_one_line(tmp_path, said):
        import_hf.main([str(folder), str(tmp_path / "back.pt")])
