"""``--task streaming_language_modeling`` in fairseq's commands."""

import math
import re
from pathlib import Path

import pytest
import torch
from fairseq.data import data_utils
from torch.nn import functional as F

from fairseq_plugin import FlowformerLanguageModel
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn, run_two_processes, training_command
from tests.fairseq_plugin.helpers.logs import entries, losses, perplexity

TASK = ["--task", "streaming_language_modeling"]
#: Eight streams in training, two in validation.
ROWS = ["--tokens-per-sample", "24", "--batch-size", "8", "--batch-size-valid", "2", "--attention-dropout", "0.1"]


@pytest.fixture(scope="module")
def evaluated(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a short training on streams, and what evaluation then said, in four ways."""
    folder = tmp_path_factory.mktemp("streams")
    base = [data_bin, "--user-dir", USER_DIR, "--path", str(folder / "checkpoint_best.pt"), "--cpu"]
    commands = [("fairseq_cli.train", training_command(data_bin, str(folder), "flowformer_lm", *TASK, *ROWS), "")]
    for more in (
        "--tokens-per-sample 24",
        "--tokens-per-sample 31 --num-workers 2",
        "--tokens-per-sample 24 --batch-size 3",
    ):
        commands.append(("fairseq_cli.eval_lm", [*base, *TASK, *more.split()], ""))
    commands.append(("fairseq_cli.validate", [*base, *TASK, "--valid-subset", "test", "--batch-size", "1"], ""))
    commands.append(("fairseq_cli.eval_lm", [*base, "--tokens-per-sample", "24"], ""))
    return folder, run_in_turn(*commands)


def test_evaluation_is_the_forward_pass_over_the_whole_file(evaluated: tuple[Path, list[str]], data_bin: str) -> None:
    """By fairseq-eval-lm with blocks of any size and workers, and by fairseq-validate; not in windows or rows."""
    folder, (_, blocks, others, rows, validated, windows) = evaluated
    hub = FlowformerLanguageModel.from_pretrained(str(folder), "checkpoint_best.pt", data_name_or_path=data_bin).eval()
    lines = data_utils.load_indexed_dataset(str(Path(data_bin) / "test"), hub.task.dictionary, None)
    text = torch.cat([torch.tensor([hub.task.dictionary.eos()]), *lines]).long()
    with torch.no_grad():
        logits = hub.models[0](text[None, :-1])[0][0]
    whole = 2 ** (float(F.cross_entropy(logits, text[1:])) / math.log(2))
    assert perplexity(blocks) == perplexity(others) == pytest.approx(whole, abs=6e-3)
    assert float(re.findall(r"\| ppl ([\d.]+)", validated)[-1]) == pytest.approx(whole, abs=6e-3)
    assert perplexity(windows) != perplexity(blocks) != perplexity(rows)


def test_validation_in_training_is_that_of_the_task(evaluated: tuple[Path, list[str]]) -> None:
    """Training learns, and validates."""
    trained = evaluated[1][0]
    assert len(entries(trained, "valid")) == 1 and losses(trained)[-1] < losses(trained)[0]


@pytest.mark.parametrize("more", [[], ["--disable-validation"]], ids=["validated", "not validated"])
def test_two_processes(more: list[str], data_bin: str, tmp_path: Path) -> None:
    """They train as one with twice the rows, and go on in the middle of an epoch with the same losses."""
    model = ["flowformer_lm", *TASK, *ROWS, "--dropout", "0", "--attention-dropout", "0", *more]
    together = training_command(data_bin, str(tmp_path / "two"), *model, "--batch-size", "4")
    together += ["--save-interval-updates", "3", "--load-checkpoint-on-all-dp-ranks", "--update-freq", "2"]
    alone = training_command(data_bin, str(tmp_path / "one"), *model, "--update-freq", "2")
    whole = losses(run_two_processes(together)[0])
    (one,) = run_in_turn(("fairseq_cli.train", alone, ""))
    assert len(whole) == 6 and whole == pytest.approx(losses(one), abs=2e-3)
    last = tmp_path / "two" / "checkpoint_last.pt"
    wanted = torch.load(last, weights_only=False)["model"]
    (tmp_path / "two" / "checkpoint_1_3.pt").rename(last)
    assert losses(run_two_processes(together)[0]) == whole[3:]
    resumed = torch.load(last, weights_only=False)["model"]
    assert all(torch.equal(resumed[name], wanted[name]) for name in wanted)
