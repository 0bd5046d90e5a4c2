"""The authors' released language model loads in every supported way, and computes the same as theirs."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_plugin import FlowformerLanguageModel
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.checkpoint_files import KINDS, command, save
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn, training_command
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.released_model import released_forward, released_weights
from tests.fairseq_plugin.helpers.text import tokens

LAYERS, HEADS = 2, 4
#: The option of fairseq-eval-lm for reading the file unconverted.
OVERRIDES = {"cfg": "{'model': {'_name': 'flowformer_lm'}}", "args": "{'arch': 'flowformer_lm'}"}
#: Files that a training starts from.
TRAINED = ("cfg", "args_converted")
SHARED = "--share-decoder-input-output-embed"


class Released(NamedTuple):
    """A file in the authors' layout, its weights, and outputs of commands."""

    folder: Path
    weights: dict[str, torch.Tensor]
    pre_norm: bool
    outputs: dict[str, str]
    expected_loss: float

    def logits(self, sequence: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The logits of the transcription."""
        state = {name: weight.to(dtype) for name, weight in self.weights.items()}
        return released_forward(sequence, state, HEADS, LAYERS, self.pre_norm)


def _loss(data: str, weights: dict[str, torch.Tensor], pre_norm: bool) -> float:
    """Bits per token of the test set in blocks of 48, by the transcription."""
    args = options.parse_args_and_arch(options.get_training_parser(), [data, *command("transformer_lm")[1:]])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("test")
    dataset, losses = task.dataset("test"), []
    for sample in (dataset[i] for i in range(len(dataset))):
        logits = released_forward(sample["source"][None], weights, HEADS, LAYERS, pre_norm)
        losses.append(logits[0].log_softmax(-1).gather(1, sample["target"][:, None]))
    return -torch.cat(losses).mean().item() / math.log(2)


@pytest.fixture(scope="module", params=[True, False], ids=["pre-norm", "post-norm"])
def released(request: pytest.FixtureRequest, data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Released:
    """Both kinds of file, converted, evaluated converted and unconverted, and trained without updates."""
    pre_norm, folder = request.param, tmp_path_factory.mktemp("released")
    symbols = len((Path(data_bin) / "dict.txt").read_text().splitlines()) + 4
    weights = released_weights(symbols, 32, 64, LAYERS, pre_norm=pre_norm)
    norm = ["--decoder-normalize-before"] if pre_norm else []
    post_norm_flag = [] if pre_norm else ["--lineartime-post-norm"]
    evaluation = [data_bin, "--user-dir", USER_DIR, *"--cpu --tokens-per-sample 48 --gen-subset test --path".split()]
    commands = {}
    for kind in KINDS:
        original = save(folder / f"{kind}.pt", weights, kind, "transformer_lm", *SMALL, SHARED, *norm)
        converted = str(folder / f"{kind}_converted.pt")
        override = OVERRIDES[kind]
        if not pre_norm:
            override = override.replace("'flowformer_lm'", "'flowformer_lm', 'lineartime_post_norm': True")
        as_it_is = [*evaluation, str(original), "--model-overrides", override]
        commands[f"convert {kind}"] = ("fairseq_plugin.convert", [str(original), converted], "")
        commands[f"converted {kind}"] = ("fairseq_cli.eval_lm", [*evaluation, converted], "")
        commands[f"as it is {kind}"] = ("fairseq_cli.eval_lm", as_it_is, "")
    for name in TRAINED:
        training = training_command(data_bin, str(folder / f"trained_{name}"), "flowformer_lm", SHARED, *post_norm_flag)
        training += ["--lr", "0", "--max-update", "1", "--disable-validation", "--no-epoch-checkpoints"]
        training += ["--finetune-from-model", str(folder / f"{name}.pt")]
        commands[f"train {name}"] = ("fairseq_cli.train", training, "")
    outputs = dict(zip(commands, run_in_turn(*commands.values())))
    return Released(folder, weights, pre_norm, outputs, _loss(data_bin, weights, pre_norm))


@pytest.mark.parametrize("file", ["cfg.pt", "args.pt", "cfg_converted.pt", "args_converted.pt"])
def test_in_python(released: Released, data_bin: str, file: str) -> None:
    """``from_pretrained`` gives the authors' logits, for the original and the converted file."""
    hub = FlowformerLanguageModel.from_pretrained(str(released.folder), file, data_bin)
    sequence = tokens(2, 150)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        (model,) = hub.eval().to(dtype).models
        assert type(model) is FlowformerLanguageModel
        with torch.no_grad():
            assert_close("logits", model(sequence)[0], released.logits(sequence, dtype), tolerance)


def test_the_transcription_attends(released: Released) -> None:
    """An earlier token changes later predictions, so the tests above depend on attention."""
    sequence = tokens(1, 30)
    other_sequence = sequence.clone()
    other_sequence[0, 0] = 4 + (sequence[0, 0] - 3) % 50
    difference = released.logits(sequence)[0, -1] - released.logits(other_sequence)[0, -1]
    assert difference.norm() > 1e-3 * released.logits(sequence)[0, -1].norm()


@pytest.mark.parametrize("way", ["converted cfg", "converted args", "as it is cfg", "as it is args"])
def test_evaluation(released: Released, way: str) -> None:
    """fairseq-eval-lm prints the transcription's loss."""
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", released.outputs[way]).group(1))
    assert abs(loss - released.expected_loss) <= 6e-5


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on(released: Released, name: str) -> None:
    """--finetune-from-model loads every weight, as logged; a step of size zero keeps them."""
    log = released.outputs[f"train {name}"]
    assert "FlowformerLanguageModel: " in log and "; 0 new" in log
    trained = torch.load(released.folder / f"trained_{name}" / "checkpoint_last.pt")["model"]
    trained = weights(trained)
    for weight_name, weight in released.weights.items():
        if not weight_name.endswith("_float_tensor"):  # a marker of fairseq's earlier versions
            assert torch.equal(trained[weight_name], weight), weight_name
    assert trained.keys() == {name for name in released.weights if not name.endswith("_float_tensor")}


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_says_what_was_taken(released: Released, kind: str) -> None:
    """Reports the count, an old marker of fairseq and the optimiser's state; it does not claim equivalence."""
    loaded_count, left_out = len(released.weights) - 1, "decoder.embed_positions._float_tensor, last_optimizer_state"
    expected = rf"flowformer_lm; {loaded_count} tensors .*; 2 left out \({re.escape(left_out)}\); 0 new"
    assert re.search(expected, released.outputs[f"convert {kind}"])
