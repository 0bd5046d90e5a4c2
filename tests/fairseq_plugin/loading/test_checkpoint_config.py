"""A checkpoint's configuration runs no code, resolves nothing from elsewhere and opens no file; data are read."""

import ast
import copy
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fairseq
import fairseq_cli
import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from omegaconf import AnyNode, ListConfig

from fairseq_plugin.convert import convert
from fairseq_plugin.loading.checkpoint_config import FREE_TEXTS, check_configuration, check_files, check_texts
from tests.compare import weights
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, save_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line

MARK = "executed"
ATTACK = f"open({MARK!r}, 'w') and [9]"
CODE = (ATTACK, ATTACK.encode(), repr(ATTACK), "(" * 10_000)
CODE += ("f'{exit}'", "x[0]", "().__class__", "sys.path*9", "9**9**9", "1<<99", "[exit()]", "{a: 1}", "1," * 600_000)
INTERPOLATIONS = ("${oc.env:HOME}", "a${oc.env:HOME}", "\\${oc.env:HOME}", "${oc.${task._name}:HOME}", "${a}${b}")
LAYERS = ("1000000000", "1_000_000_000", "0x3B9ACA00", "'1000000000'", b"1000000000", 10**400, torch.tensor(10**9))
DATA = ("[20, 40]", "20,40", "{'name': 'x'}", '{"beam": 5, "nbest": null}', "???", "env://x:1", "@@ ", "</s>", "\u2581")
DATA += ("/cafe\u0301/$run", "1.;0.0", "", None, [20, 40], 3, 10**5_000, True)


class Stored(NamedTuple):
    """An option as a checkpoint stores it: its group, its name and its value."""

    group: str
    name: str
    value: Any


def _doubled(make: Callable[[list], Any]) -> Any:
    """A list of 2**40 values, which is small in a file: both halves of each list are the same object."""
    nested = make([1])
    for _ in range(40):
        inner, nested = nested, make([])
        if isinstance(nested, ListConfig):
            vars(nested)["_content"] = [inner, inner]  # omegaconf's own methods would copy them
        else:
            nested += [inner, inner]
    return nested


#: Fairseq would run, resolve or build these, whichever option has them. "more" is an option that nobody reads.
DANGEROUS = [
    Stored("model", "adaptive_softmax_cutoff", ATTACK),
    *(Stored("model", "more", text) for text in (*CODE, *INTERPOLATIONS)),
    Stored("bpe", "more", INTERPOLATIONS[0]),
    Stored("common", "wandb_project", INTERPOLATIONS[0]),
    Stored("task", "left_pad_source", ATTACK),
    Stored("criterion", "wer_args", ATTACK),
    Stored("model", "more", {"x": {"adam_betas": ATTACK}}),
    Stored("model", "more", Namespace(adam_betas=ATTACK)),
    Stored("model", "more", [{"adam_betas": ATTACK}]),
    Stored("model", "adam_betas", AnyNode(repr(ATTACK))),
    Stored("model", "more", _doubled(list)),
    Stored("model", "more", _doubled(ListConfig)),
    Stored("model", "more", {"list": [1] * 900, "copies": ["${model.more.list}"] * 19_000}),
    *(Stored("model", "decoder_layers", number) for number in LAYERS),
    Stored("model", "decoder", {"layers": 10**9}),
    Stored("model", "char_embedder_highway_layers", 1e9),
    Stored("model", "decoder_layers_to_keep", "0," * 400_000),
    *(Stored("model", option, AnyNode("../../../other")) for option in ("bpe", "tokenizer", "scoring")),
]
#: Files and tasks that are the user's to give, and options of other kinds than the model's.
WRONG = [
    Stored("bpe", "bpe_codes", "codes"),
    Stored("bpe", "gpt2_encoder_json", "https://example.org/encoder.json"),
    Stored("tokenizer", "_name", "../../../tmp/x"),
    Stored("generation", "replace_unk", "dictionary"),
    Stored("task", "source_lang", "../../en"),
    Stored("task", "source_dict", "/etc/hosts"),
    Stored("model", "pretrained_model", "/etc/hosts"),
    Stored("task", "_name", "unheard_of"),
    Stored("task", "tokens_per_sample", [1, "a"]),
    Stored("model", "dropout", {"a": 1}),
    Stored("model", "decoder_layers", float("nan")),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """Function that returns the content of a small checkpoint of an architecture, in either format."""
    folder, contents = tmp_path_factory.mktemp("stored"), {}

    def state(arch: str, kind: str) -> dict[str, Any]:
        if (arch, kind) not in contents:
            save_model(folder / "c.pt", kind, arch)
            contents[arch, kind] = torch.load(folder / "c.pt")
        return copy.deepcopy(contents[arch, kind])

    return state


def _with(state: dict[str, Any], option: Stored) -> dict[str, Any]:
    """``state`` with an option in a group of its configuration, or in its namespace of all options."""
    if state["args"] is not None:
        setattr(state["args"], {"_name": option.group}.get(option.name, option.name), option.value)
    else:
        group = state["cfg"].get(option.group) or {}
        state["cfg"][option.group] = {**group, option.name: option.value}
    return state


def _load(folder: Path, data: str, arch: str = "linear_lm", **options: Any) -> Any:
    return ARCH_MODEL_REGISTRY[arch].from_pretrained(str(folder), "c.pt", data, **options)


def _show(option: Any) -> str | None:
    return f"{option.group}-{option.name}" if isinstance(option, Stored) else None


@pytest.mark.parametrize(("option", "runs"), [*((x, True) for x in DANGEROUS), *((x, False) for x in WRONG)], ids=_show)
def test_an_option_that_is_no_data_or_not_the_checkpoints_to_choose_is_refused(
    option: Stored, runs: bool, stored, data_bin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``from_pretrained``, in both formats, and where fairseq would run it by ``convert``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("_name: ${oc.env:HOME}\n")
    for kind in KINDS:
        torch.save(_with(stored("linear_lm", kind), option), "c.pt")
        with refused_in_one_line(tmp_path, "c.pt'"):
            _load(tmp_path, data_bin)
    if runs:
        torch.save(_with(stored("transformer_lm", kind), option), "c.pt")
        with refused_in_one_line(tmp_path, "c.pt' has"):
            convert(tmp_path / "c.pt", "linear_lm")


def test_parts_and_texts_of_other_types_are_refused(stored, data_bin: str, tmp_path: Path) -> None:
    """Also texts that torch does not load by default, but others do."""
    for value in (bytearray(ATTACK.encode()), np.array(repr(ATTACK))):
        with refused_in_one_line(tmp_path, "c.pt' has adam_betas"):
            check_configuration({"args": Namespace(adam_betas=value)}, "c.pt")
    for part in ("cfg", "args", "optimizer_history", "extra_state", "task_state"):
        torch.save({**stored("linear_lm", "args" if part == "args" else "cfg"), part: [1, "a"]}, tmp_path / "c.pt")
        with refused_in_one_line(tmp_path, str(tmp_path / "c.pt")):
            _load(tmp_path, data_bin)


def test_references_are_followed_but_not_to_code_or_without_end(stored, data_bin: str, tmp_path: Path) -> None:
    def checkpoint(*options: Stored) -> None:
        state = stored("linear_lm", "cfg")
        for option in options:
            _with(state, option)
        torch.save(state, tmp_path / "c.pt")

    checkpoint(Stored("model", "dropout", "${common.seed}"), Stored("common", "seed", 0.25))
    assert _load(tmp_path, data_bin).models[0].decoder.dropout_module.p == 0.25
    lists = [Stored("model", "a0", [1] * 10)]
    lists += [Stored("model", f"a{i + 1}", [f"${{model.a{i}}}"] * 10) for i in range(8)]
    text = [Stored("model", "adaptive_softmax_cutoff", "${common.wandb_project}")]
    for options in (
        [*text, Stored("common", "wandb_project", ATTACK)],
        [Stored("model", "dropout", "${common.nothing}")],
        lists,
    ):
        checkpoint(*options)
        with refused_in_one_line(tmp_path, "c.pt'"):
            _load(tmp_path, data_bin)


@pytest.mark.parametrize("kind", KINDS)
def test_data_are_read(kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """Numbers, words, lists and dictionaries; any text where fairseq evaluates none; a thousand small layers."""
    state = stored("linear_lm", kind)
    for i, value in enumerate(DATA):
        _with(state, Stored("model", f"more{i}", value))
        check_texts(MODEL_REGISTRY["linear_lm"], Namespace(adaptive_softmax_cutoff=value))
    for name in FREE_TEXTS:
        _with(state, Stored("task", name, "/my data (1)/flow*3"))
        for arch in ("linear_lm", "linear", "linear_mlm"):
            check_texts(MODEL_REGISTRY[arch], Namespace(**{name: "/my data (1)/flow*3"}))
    check_configuration(state, "c.pt")
    state = _with(stored("linear_lm", kind), Stored("model", "char_embedder_highway_layers", 1_000))
    if kind == "cfg":  # what is not read when a model is loaded may be anything
        _with(state, Stored("checkpoint", "patience", "many"))
    torch.save(state, tmp_path / "c.pt")
    assert _load(tmp_path, data_bin).models


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_the_users(kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """Given as options, or beside the checkpoint under the names of fairseq's hub, they replace those of the file."""
    state, bpe = stored("linear_lm", kind), {"gpt2_encoder_json": "/nowhere/a", "gpt2_vocab_bpe": "/nowhere/b"}
    if kind == "cfg":
        state["cfg"]["bpe"] = {"_name": "gpt2", **bpe}
    else:
        vars(state["args"]).update(bpe="gpt2", **bpe)
    torch.save(state, tmp_path / "c.pt")
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with refused_in_one_line(tmp_path, "gpt2_encoder_json = '/nowhere/a'"):
        _load(tmp_path, data_bin)
    given = {name: str(tmp_path / file) for name, file in zip(bpe, ("encoder.json", "vocab.bpe"))}
    assert _load(tmp_path, data_bin, **given).bpe.encode("a") == "0"
    (tmp_path / "bpecodes").touch()
    check_files(_with(state, Stored("bpe", "bpe_codes", "/nowhere/codes")), str(tmp_path / "c.pt"), given)


def test_pretrained_embeddings_are_not_read_again(pairs_bin: str, tmp_path: Path) -> None:
    """A model trained with --encoder-embed-path loads without that file: its weights hold the embeddings."""
    languages = ("--task", "translation", "--source-lang", "in", "--target-lang", "out")
    expected = weights(save_model(tmp_path / "c.pt", "args", "flow", *languages).state_dict())
    state = torch.load(tmp_path / "c.pt")
    vars(state["args"]).update({f"{side}_embed_path": "/nowhere/embeddings" for side in ("encoder", "decoder")})
    torch.save(state, tmp_path / "c.pt")
    (model,) = _load(tmp_path, pairs_bin, "flow").models
    assert all(torch.equal(x, expected[name]) for name, x in weights(model.state_dict()).items())


def test_fairseqs_own_commands_run_nothing_for_our_models(stored, data_bin: str, tmp_path: Path, monkeypatch) -> None:
    """For fairseq's own model they run the code, so it is an attack."""
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        for arch in ("linear_lm", "transformer_lm"):
            torch.save(_with(stored(arch, kind), Stored("model", "adaptive_softmax_cutoff", ATTACK)), "c.pt")
            # A cutoff changes the weights of fairseq's own model.
            with pytest.raises(Exception, match="adaptive_softmax_cutoff|no longer supported"):
                load_model_ensemble_and_task(["c.pt"], {"data": data_bin})
            assert Path(MARK).exists() == (arch == "transformer_lm")
        Path(MARK).unlink()


@pytest.mark.parametrize("name", ["linear_lm", "flash_mlm", "linear_classifier", "flow"])
def test_a_model_that_is_built_from_options_runs_none_of_them(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused_in_one_line(tmp_path, "encoder_xformers_att_config = "):
        MODEL_REGISTRY[name].build_model(Namespace(arch=name, encoder_xformers_att_config=ATTACK), None)


def test_no_free_text_is_one_that_fairseq_evaluates() -> None:
    """All options and variables that fairseq's source passes to ``eval``, whichever version is installed."""
    evaluating = {"eval", "exec", "__import__", "eval_str_list", "eval_str_dict", "eval_bool"}
    names = set()
    for path in (path for package in (fairseq, fairseq_cli) for path in Path(package.__file__).parent.rglob("*.py")):
        text = path.read_text()
        if not any(word in text for word in ("eval", "exec(", "__import__")):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in fairseq's strings
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
        for call in calls:  # not methods such as model.eval
            owner = getattr(getattr(call.func, "value", None), "id", "")
            called = getattr(call.func, "id", getattr(call.func, "attr", "") if owner in ("utils", "options") else "")
            if called in evaluating:
                names.add(getattr(call.args[0], "attr", getattr(call.args[0], "id", "")))
    assert len(names) > 40 and not names & FREE_TEXTS
