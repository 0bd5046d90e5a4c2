"""A checkpoint's configuration cannot run code, resolve values from elsewhere, or make fairseq open a file."""

import ast
import copy
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq
import fairseq_cli
import numpy as np
import pytest
import torch
from fairseq import options, tasks
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import AnyNode, ListConfig, OmegaConf

from fairseq_plugin.convert import convert
from fairseq_plugin.loading.checkpoint_config import FREE_TEXTS, check_configuration, check_files, check_texts
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, save_model
from tests.fairseq_plugin.helpers.encoder_decoders import SMALL

MARK = "executed"
ATTACK = f"open({MARK!r}, 'w') and [9]"
CODE = (
    ATTACK,
    ATTACK.encode(),
    bytearray(ATTACK.encode()),
    "(" * 10_000,
    "f'{exit}'",
    "x[0]",
    "().__class__",
    repr(ATTACK),
    "sys.path*9",
    "9**9**9",
    "1<<99",
    "[exit()]",
    "{a: 1}",
)
_EVALUATING = {"eval", "exec", "__import__", "eval_str_list", "eval_str_dict", "eval_bool"}


def evaluated() -> set[str]:
    """Names of all options and variables that fairseq's source passes to ``eval``."""
    names = set()
    for package in (fairseq, fairseq_cli):
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            text = path.read_text()
            for node in ast.walk(_parsed(text)) if "eval" in text or "exec(" in text or "__import__" in text else ():
                if isinstance(node, ast.Call) and _called(node.func) in _EVALUATING and node.args:
                    argument = node.args[0]
                    names.add(argument.attr if isinstance(argument, ast.Attribute) else getattr(argument, "id", ""))
    return names


def _parsed(text: str) -> ast.AST:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in fairseq's strings
        return ast.parse(text)


def _called(function: ast.expr) -> str:
    """The name of the called function; "" for a method such as ``model.eval``."""
    if isinstance(function, ast.Name):
        return function.id
    owner = getattr(function, "value", None)
    return function.attr if isinstance(owner, ast.Name) and owner.id in ("utils", "options") else ""


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


def _put(state: dict[str, Any], group: str, name: str, value: Any) -> dict[str, Any]:
    """Set an option of ``state``, in a group of its configuration or in its namespace of all options."""
    if state["args"] is not None:
        setattr(state["args"], name, value)
    else:
        state["cfg"].setdefault(group, {})
        state["cfg"][group] = {**(state["cfg"][group] or {}), name: value}
    return state


def _refused(path: Path, state: dict[str, Any], arch: str, data: str, **options: Any) -> str:
    """The error message of ``from_pretrained``, which must name the file."""
    torch.save(state, path)
    with pytest.raises(ValueError, match=f"the checkpoint '{path}'.*allowed") as error:
        ARCH_MODEL_REGISTRY[arch].from_pretrained(str(path.parent), path.name, data, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_no_option_is_code(kind: str, stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No option can hold code, evaluated by fairseq or not; the message names file, option and value."""
    monkeypatch.chdir(tmp_path)
    names, state = evaluated(), stored("linear_lm", kind)
    assert len(names) > 40 and not names & FREE_TEXTS
    for name in sorted({*names, "unheard_of"} - {""}):
        for text in CODE if name in ("adaptive_softmax_cutoff", "unheard_of") else (ATTACK,):
            changed = _put(copy.deepcopy(state), "model", name, text)
            with pytest.raises(ValueError, match=f"'c.pt' has {name} = ") as error:
                check_configuration(changed, "c.pt")
            assert f"{name} = {repr(text)[:90]}" in str(error.value) and len(str(error.value)) < 300
    assert not Path(MARK).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_data_are_read(kind: str, stored) -> None:
    """Numbers, lists and dictionaries as Python and JSON write them, words and paths are accepted."""
    texts = (
        "[20, 40]",
        "20,40",
        "{'name': 'x'}",
        "(0.9, 0.98)",
        '{"beam": 5, "nbest": null}',
        "???",
        "env://x:1",
        "@@ ",
        "</s>",
        "\u2581",
        "/cafe\u0301/$run",
        "1.;0.0",
    )
    for value in (*texts, "", None, [20, 40], 3, 10**5_000, True):
        check_configuration(_put(stored("linear_lm", kind), "model", "unheard_of", value), "c.pt")
        check_texts(ARCH_MODEL_REGISTRY["linear_lm"], Namespace(adaptive_softmax_cutoff=value))
    for name in FREE_TEXTS:
        check_configuration(_put(stored("linear_lm", kind), "task", name, "/my data (1)/flow*3"), "c.pt")
        for arch in ("linear_lm", "linear", "linear_mlm"):
            check_texts(ARCH_MODEL_REGISTRY[arch], Namespace(**{name: "/my data (1)/flow*3"}))


def test_an_array_of_a_text_is_a_text() -> None:
    with pytest.raises(ValueError, match="'c.pt' has adam_betas = .*allowed"):
        check_configuration({"args": Namespace(adam_betas=np.array(repr(ATTACK)))}, "c.pt")


def test_long_texts_are_refused() -> None:
    """Python would need a gigabyte to parse a literal of a megabyte; the message does not repeat the text."""
    for text in ("1," * 600_000, f"[{'0,' * 600_000}]"):
        with pytest.raises(ValueError, match=r"'c.pt' has adam_betas of 1,200,\d+ characters; allowed") as error:
            check_configuration({"args": Namespace(adam_betas=text)}, "c.pt")
        assert len(str(error.value)) < 200


@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_read_checkpoints_refuse_code(
    kind: str, stored, data_bin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from_pretrained`` and ``convert`` refuse code and do not run it."""
    monkeypatch.chdir(tmp_path)
    for name in ("adaptive_softmax_cutoff", "encoder_xformers_att_config", "unheard_of"):
        state = _put(stored("linear_lm", kind), "model", name, ATTACK)
        assert f"{name} = {ATTACK!r}" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)
        torch.save(_put(stored("transformer_lm", kind), "model", name, ATTACK), "stock.pt")
        with pytest.raises(ValueError, match=rf"'stock.pt' has {name} = .*{MARK}.*allowed"):
            convert(Path("stock.pt"), "linear_lm")
    assert not Path(MARK).exists()


def test_convert_reads_no_other_file(stored, tmp_path: Path) -> None:
    """hydra reads the file "bpe/NAME.yaml", in which any interpolation is resolved; NAME may not be a path."""
    (tmp_path / "other.yaml").write_text("_name: ${oc.env:HOME}\n")
    name = f"{'../' * 30}{tmp_path.relative_to('/')}/other"
    for option in ("bpe", "tokenizer", "scoring"):
        state = stored("transformer_lm", "args")
        torch.save(_put(state, "model", option, AnyNode(name)), tmp_path / "stock.pt")
        with pytest.raises(ValueError, match=rf"stock.pt' has {option} = .*other.*allowed"):
            convert(tmp_path / "stock.pt", "linear_lm")


PLACES: dict[str, tuple[str, str, Any]] = {
    "the task's options": ("task", "left_pad_source", ATTACK),
    "the criterion's": ("criterion", "wer_args", ATTACK),
    "a group in a group": ("model", "more", {"x": {"adam_betas": ATTACK}}),
    "a namespace": ("model", "more", Namespace(adam_betas=ATTACK)),
    "a list": ("model", "more", [{"adam_betas": ATTACK}]),
    "a node of omegaconf": ("model", "adam_betas", AnyNode(repr(ATTACK))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_place(place: str, kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """An option is checked wherever it is stored."""
    state = _put(stored("linear_lm", kind), *PLACES[place])
    assert "allowed: numbers" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)


@pytest.mark.parametrize("kind", KINDS)
def test_the_attack_is_one(kind: str, stored, data_bin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq runs the code for its own model; for one of our models, its commands do not run it."""
    monkeypatch.chdir(tmp_path)
    for arch, runs in (("linear_lm", False), ("transformer_lm", True)):
        torch.save(_put(stored(arch, kind), "model", "adaptive_softmax_cutoff", ATTACK), "c.pt")
        with pytest.raises(Exception) as error:  # a cutoff changes the weights of fairseq's own model
            load_model_ensemble_and_task(["c.pt"], {"data": data_bin})
        assert Path(MARK).exists() == runs
        assert runs or ("adaptive_softmax_cutoff" in str(error.value) and ATTACK in str(error.value))


@pytest.mark.parametrize("arch", ["linear_lm", "flash_mlm", "linear_classifier", "flow"])
def test_models_run_nothing(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of every kind, built by fairseq's commands from the options of a file, run no code."""
    monkeypatch.chdir(tmp_path)
    args = Namespace(arch=arch, encoder_xformers_att_config=ATTACK)
    with pytest.raises(ValueError, match="encoder_xformers_att_config = .*allowed"):
        ARCH_MODEL_REGISTRY[arch].build_model(args, None)
    assert not Path(MARK).exists()


INTERPOLATIONS = (
    "${oc.env:HOME}",
    "${oc.env:HOME,x}",
    "a${oc.env:HOME}",
    "\\${oc.env:HOME}",
    "${oc.${task._name}:HOME}",
    "${oc.decode:'${oc.env:HOME}'}",
    "${a}${b}",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", INTERPOLATIONS)
def test_interpolations_are_refused(value: str, kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """Environment and other resolvers are refused; only references to options of the same file are resolved."""
    for group, name in (("model", "unheard_of"), ("bpe", "unheard_of"), ("common", "wandb_project")):
        state = _put(stored("linear_lm", kind), group, name, value)
        assert f"{name} = {value!r}" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)
        torch.save(_put(stored("transformer_lm", kind), group, name, value), tmp_path / "stock.pt")
        with pytest.raises(ValueError, match=name):
            convert(tmp_path / "stock.pt", "linear_lm")


def test_references(stored, data_bin: str, tmp_path: Path) -> None:
    """References are replaced by their targets, which are checked too."""
    state = _put(stored("linear_lm", "cfg"), "model", "dropout", "${common.seed}")
    torch.save(_put(state, "common", "seed", 0.25), tmp_path / "c.pt")
    (model,) = ARCH_MODEL_REGISTRY["linear_lm"].from_pretrained(str(tmp_path), "c.pt", data_bin).models
    assert model.decoder.dropout_module.p == 0.25
    state = _put(stored("linear_lm", "cfg"), "model", "adaptive_softmax_cutoff", "${common.wandb_project}")
    _put(state, "common", "wandb_project", ATTACK)
    assert ATTACK in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)
    state = _put(stored("linear_lm", "cfg"), "model", "dropout", "${common.nothing}")
    assert "cannot be read" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)


def _doubled(times: int) -> list:
    """A list of 2**times values, which is small in a file: both halves of each list are the same object."""
    nested: list = []
    for _ in range(times):
        nested = [nested, nested]
    return nested


def _doubled_nodes(times: int) -> ListConfig:
    """As ``_doubled``, of omegaconf's lists."""
    nested = ListConfig([1])
    for _ in range(times):
        inner, nested = nested, ListConfig([])
        vars(nested)["_content"] = [inner, inner]  # omegaconf's own methods would copy them
    return nested


SMALL_IN_A_FILE: dict[str, Callable[[], Any]] = {
    "lists": lambda: _doubled(40),
    "omegaconf's lists": lambda: _doubled_nodes(40),
    "references to one list": lambda: {"list": [1] * 900, "copies": ["${model.more.list}"] * 19_000},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SMALL_IN_A_FILE)
def test_a_small_file_is_no_large_configuration(name: str, kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """Containers that share parts, and references, are small in a file but would expand to fill all memory."""
    state = _put(stored("linear_lm", kind), "model", "more", SMALL_IN_A_FILE[name]())
    message = _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)
    assert "values" in message or (kind == "args" and "no interpolation" in message)


LAYERS: dict[str, Any] = {
    "decoder_layers": 10**9,
    "encoder_layers": 10**400,
    "char_embedder_highway_layers": 1e9,
    "decoder_layers_to_keep": "0," * 400_000,
    "decoder": {"layers": 10**9},
    "layers": torch.tensor(10**9),
}
TEXTS_OF_NUMBERS = ("1000000000", "1_000_000_000", "0001000000000", "0x3B9ACA00", "'1000000000'", b"1000000000")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_without_weights_are_not_built(kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """A billion small layers would be built one by one until memory is full; a thousand are possible."""
    state, arch = stored("linear_lm", kind), ARCH_MODEL_REGISTRY["linear_lm"]
    for name, value in [*LAYERS.items(), *(("decoder_layers", text) for text in TEXTS_OF_NUMBERS)]:
        changed = _put(copy.deepcopy(state), "model", name, value)
        assert "layers" in _refused(tmp_path / "c.pt", changed, "linear_lm", data_bin)
        with pytest.raises(ValueError, match="'c.pt' has .*layers.* = .*allowed: at most 1,000"):
            check_configuration(changed, "c.pt")
    torch.save(_put(state, "model", "char_embedder_highway_layers", 1_000), tmp_path / "c.pt")
    assert arch.from_pretrained(str(tmp_path), "c.pt", data_bin).models


def test_references_to_references_in_lists_are_refused(stored, data_bin: str, tmp_path: Path) -> None:
    """Lists of ten references to such lists would also expand to fill all memory."""
    state = _put(stored("linear_lm", "cfg"), "model", "a0", [1] * 10)
    for i in range(8):
        _put(state, "model", f"a{i + 1}", [f"${{model.a{i}}}"] * 10)
    assert "allowed: the name of another option" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)


FILES = (
    ("bpe", "bpe_codes", "codes"),
    ("bpe", "gpt2_encoder_json", "https://example.org/encoder.json"),
    ("tokenizer", "_name", "../../../tmp/x"),
    ("generation", "replace_unk", "dictionary"),
    ("task", "source_lang", "../../en"),
    ("task", "source_dict", "/etc/hosts"),
    ("model", "pretrained_model", "/etc/hosts"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "name", "value"), FILES)
def test_files_and_addresses_are_the_users(
    group: str, name: str, value: str, kind: str, stored, data_bin: str, tmp_path: Path
) -> None:
    """A file or URL named only by the checkpoint is refused; the message says how to pass one."""
    state = _put(stored("linear_lm", kind), group, name, value)
    assert f"{name} = {value!r}" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_given(kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """The user's value overrides the checkpoint's."""
    state, bpe = stored("linear_lm", kind), {"gpt2_encoder_json": "/nowhere/a", "gpt2_vocab_bpe": "/nowhere/b"}
    if kind == "cfg":
        state["cfg"]["bpe"] = {"_name": "gpt2", **bpe}
    else:
        vars(state["args"]).update(bpe="gpt2", **bpe)
    assert "gpt2_encoder_json = '/nowhere/a'" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    files = {name: str(tmp_path / file) for name, file in zip(bpe, ("encoder.json", "vocab.bpe"))}
    hub = ARCH_MODEL_REGISTRY["linear_lm"].from_pretrained(str(tmp_path), "c.pt", data_bin, **files)
    assert hub.bpe.encode("a") == "0"


def test_files_of_the_hub(stored, tmp_path: Path) -> None:
    """fairseq prefers a file of a known name in the checkpoint's folder to the option's path."""
    state = _put(stored("linear_lm", "cfg"), "bpe", "bpe_codes", "/nowhere/codes")
    with pytest.raises(ValueError, match="bpe_codes = '/nowhere/codes'"):
        check_files(state, str(tmp_path / "c.pt"), {})
    (tmp_path / "bpecodes").touch()
    check_files(state, str(tmp_path / "c.pt"), {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_nobody_registered(kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """The error names the task and lists the registered ones."""
    state = stored("linear_lm", kind)
    if kind == "cfg":
        state["cfg"]["task"]["_name"] = "unheard_of"
    else:
        state["args"].task = "unheard_of"
    assert "'unheard_of'" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)


WRONG_KINDS: dict[str, tuple[str, Any]] = {
    "dropout": ("model", {"a": 1}),
    "decoder_layers": ("model", float("nan")),
    "patience": ("checkpoint", "many"),
    "tokens_per_sample": ("task", [1, "a"]),
    "seed": ("common", "???"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG_KINDS)
def test_options_of_another_kind(name: str, kind: str, stored, data_bin: str, tmp_path: Path) -> None:
    """An error of one line names the file, whatever fairseq, hydra or omegaconf raise, unless nothing reads it."""
    group, value = WRONG_KINDS[name]
    state = _put(stored("linear_lm", kind), group, name, value)
    if kind == "cfg" and group in ("checkpoint", "common"):  # not read when a model is loaded
        state["cfg"][group][name] = value
        torch.save(state, tmp_path / "c.pt")
        assert ARCH_MODEL_REGISTRY["linear_lm"].from_pretrained(str(tmp_path), "c.pt", data_bin).models
    else:
        assert "cannot be read" in _refused(tmp_path / "c.pt", state, "linear_lm", data_bin)


@pytest.mark.parametrize("part", ["cfg", "args", "optimizer_history", "extra_state", "task_state"])
def test_parts_of_another_kind(part: str, stored, data_bin: str, tmp_path: Path) -> None:
    """Top-level entries of the file with the wrong type."""
    state = stored("linear_lm", "args" if part == "args" else "cfg")
    state[part] = [1, "a"]
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=f"{tmp_path / 'c.pt'}.*allowed"):
        ARCH_MODEL_REGISTRY["linear_lm"].from_pretrained(str(tmp_path), "c.pt", data_bin)


@pytest.mark.parametrize("kind", KINDS)
def test_pretrained_embeddings_are_not_read_again(kind: str, stored, pairs_bin: str, tmp_path: Path) -> None:
    """A model trained with --encoder-embed-path loads without that file: its weights hold the embeddings."""
    command = [pairs_bin, "--task", "translation", "--arch", "flow", *SMALL, "--save-dir", "/nowhere/at/all"]
    args = options.parse_args_and_arch(options.get_training_parser(), command)
    args.source_lang, args.target_lang = "in", "out"
    trained = tasks.setup_task(args).build_model(args)
    args.encoder_embed_path = args.decoder_embed_path = "/nowhere/embeddings"
    state = {**stored("linear_lm", kind), "model": trained.state_dict()}
    if kind == "args":
        state["args"] = args
    else:
        config = convert_namespace_to_omegaconf(args)
        state["cfg"] = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    torch.save(state, tmp_path / "c.pt")
    (model,) = ARCH_MODEL_REGISTRY["flow"].from_pretrained(str(tmp_path), "c.pt", pairs_bin).models
    weights = trained.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
