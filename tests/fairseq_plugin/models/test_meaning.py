"""Options are stored with weights on every path of fairseq: different options warn, equal ones do not."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq import options, tasks
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.data import Dictionary
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA
from torch import Tensor, nn

from fairseq_plugin import FlowformerLanguageModel
from tests.fairseq_plugin.helpers.averages import averaged
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, build, save
from tests.fairseq_plugin.helpers.commands import NO_READER_THREAD, run_in_turn, translation_training_command
from tests.fairseq_plugin.helpers.encoder_decoders import build_model
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.text import dictionary

PAPER = ("--flow-form", "paper", "--flow-clamp", "inf")


def _moving_average(model: nn.Module) -> dict[str, Tensor]:
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.999))
    for update in range(3):
        average.step(model, updates=update)
    return average.get_model().state_dict()


#: Operations of fairseq on weights before saving, or of a user on a model.
WAYS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "as they are": lambda model: model.state_dict(),
    "averaged checkpoints": lambda model: averaged([model.state_dict()] * 3),
    "--store-ema": _moving_average,
    "--store-ema --ema-fp32": lambda model: _ema_in_float32(model),
    "--fp16": lambda model: copy.deepcopy(model).half().state_dict(),
    "--bf16": lambda model: copy.deepcopy(model).bfloat16().state_dict(),
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)).state_dict(),
}


def _ema_in_float32(model: nn.Module) -> dict[str, Tensor]:
    average = EMA(copy.deepcopy(model).half(), EMAConfig(store_ema=True, ema_decay=0.999, ema_fp32=True))
    average.step(model.half(), updates=1)
    model.float()
    return dict(average.fp32_params)


@pytest.mark.parametrize("way", WAYS)
def test_a_restart(way: str) -> None:
    """--restore-file and --finetune-from-model load the processed weights into the model of the command line."""
    state = WAYS[way](build("flowformer_lm", *SMALL, *PAPER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("flowformer_lm", *SMALL, *PAPER).load_state_dict(state)
    for other_options, match in {
        ("--flow-clamp", "inf"): "form='paper'.*form='released'",
        PAPER[:2]: "clamp=inf.*clamp=5.0",
        (*PAPER, "--decoder-attention-heads", "2"): "num_heads=4.*num_heads=2",
    }.items():
        with pytest.warns(UserWarning, match=match):
            build("flowformer_lm", *SMALL, *other_options).load_state_dict(state)
    with pytest.warns(UserWarning, match="attention='flow'.*attention='linear'"):
        build("linear_lm", *SMALL).load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_file(kind: str, tmp_path: Path, data_bin: str) -> None:
    """``from_pretrained`` and --model-overrides warn only if options differ from the trained ones."""
    model = build("flowformer_lm", *SMALL, *PAPER)
    path = save(tmp_path / "c.pt", model.state_dict(), kind, "flowformer_lm", *SMALL, *PAPER)
    ways: list[Callable[..., object]] = [
        lambda **given: FlowformerLanguageModel.from_pretrained(str(tmp_path), "c.pt", data_bin, **given),
        lambda **given: load_model_ensemble([str(path)], arg_overrides={"data": data_bin, **given}),
    ]
    for way in ways:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*weights that are loaded")
            way()
        with pytest.warns(UserWarning, match="form='paper'.*form='released'"):
            way(flow_form="released")


def test_cross_attention() -> None:
    """A warning if the cross-attention differs: another mechanism, or fairseq's own on either side."""
    state = build_model("flow", "--lineartime-cross-attention", "linear").state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model("flow", "--lineartime-cross-attention", "linear").load_state_dict(state)
    for mechanism, match in {
        "softmax": "attention='linear'.*no attention of lineartime",
        "favor": "'linear'.*'favor'",
    }.items():
        with pytest.warns(UserWarning, match=match):
            build_model("flow", "--lineartime-cross-attention", mechanism).load_state_dict(
                state, strict=mechanism == "softmax"
            )
    with pytest.warns(UserWarning, match="do not say.*attention='linear'"):
        build_model("flow", "--lineartime-cross-attention", "linear").load_state_dict(build_model("flow").state_dict())


def test_a_restart_of_fairseq_train_says_it(pairs_bin: str, tmp_path: Path) -> None:
    """One warning on the console if a flag was forgotten."""
    train = translation_training_command(pairs_bin, str(tmp_path), "flow", *NO_READER_THREAD)
    shown = tmp_path / "shown.py"  # run_in_turn hides warnings
    shown.write_text("import warnings; warnings.resetwarnings(); from fairseq_cli.train import cli_main; cli_main()")
    _, printed = run_in_turn(
        ("fairseq_cli.train", [*train, "--lineartime-cross-attention", "linear", "--max-update", "2"], ""),
        (str(shown), [*train, "--max-update", "3"], ""),
    )
    assert printed.count("the weights that are loaded") == 1 and "attention='linear'" in printed


def test_a_classifier_remembers_what_it_pools() -> None:
    """Pooling and style of a head do not affect the shapes of weights, so they are stored."""
    command = ["data", "--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", "3"]
    command += ["--arch", "flow_classifier", "--max-positions", "40", "--encoder-layers", "1", "--classifier-dim", "32"]
    command += ["--encoder-embed-dim", "16", "--encoder-attention-heads", "2"]
    task = SimpleNamespace(source_dictionary=dictionary(), max_positions=lambda: 40)

    def classifier(*arguments: str) -> nn.Module:
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, *arguments])
        model = tasks.FairseqTask.build_model(task, parsed)
        model.register_classification_head("labels", num_classes=3)
        return model

    state = classifier("--pooling", "mean").state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier("--pooling", "mean").load_state_dict(state)
    with pytest.warns(UserWarning, match="pooling='mean'.*pooling='first'"):
        classifier().load_state_dict(state)
    task.label_dictionary = Dictionary()
    for label in ("good", "bad", "neither"):
        task.label_dictionary.add_symbol(label)
    state = classifier().state_dict()
    task.label_dictionary.symbols[-3:] = ["bad", "good", "neither"]
    with pytest.warns(UserWarning, match=r"labels=\['good', 'bad', 'neither'\].*labels=\['bad', 'good', 'neither'\]"):
        classifier().load_state_dict(state)
    state = classifier("--pooling", "mean").state_dict()
    with pytest.warns(UserWarning, match="classifier_style='roberta'.*classifier_style='arena'"):
        classifier("--pooling", "mean", "--classifier-style", "arena").load_state_dict(state)
    # A file of version 0.2 does not store them, and RoBERTa's loading, which completes heads, must not add them.
    former = {name: x for name, x in state.items() if not name.endswith(".remembered._extra_state")}
    with pytest.warns(UserWarning, match="do not say which options.*pooling='first'"):
        classifier().load_state_dict(former)
    # A head that is in no file is new, without a warning.
    without_head = {name: x for name, x in state.items() if not name.startswith("classification_heads.")}
    arena = ("--pooling", "mean", "--classifier-style", "arena")
    arena_state = classifier(*arena).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier().load_state_dict(without_head)
        classifier(*arena).load_state_dict(arena_state)
