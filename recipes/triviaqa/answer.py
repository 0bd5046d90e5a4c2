"""Answer questions with trained models: ``python -m recipes.triviaqa.answer CHECKPOINT --data DIR --output FILE``.

Several checkpoints are compared, as of several learning rates; the answers of the one with the highest F1 are written,
in the form that TriviaQA's own evaluation reads.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.utils import apply_to_sample
from tqdm import tqdm

from common.checkpoints import read_checkpoint
from common.command_parser import CommandParser
from common.output_files import check_new
from fairseq_plugin.data.span_answers import best_of_each
from fairseq_plugin.loading.checkpoint_config import check_configuration
from fairseq_plugin.loading.checkpoints import stored_architecture
from fairseq_plugin.tasks.span_extraction import SpanExtractionTask

from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import Table, as_text, describe_run
from ..shared.text_files import write_lines
from .scores import Scores, score

COMMAND = "recipes.triviaqa.answer"


def load(checkpoint: Path, data: Path) -> RobertaHubInterface:
    """The model of a checkpoint of ``--task span_extraction``, for evaluation, with that task for the folder ``data``.

    Raises:
        ValueError: the file does not exist, cannot be read, or is of another task.
    """
    allowed = "allowed: one that fairseq-train --task span_extraction has written"
    if not checkpoint.is_file():
        raise ValueError(f"CHECKPOINT is {checkpoint}, which is no file; {allowed}")
    state = read_checkpoint(checkpoint)
    name = stored_architecture(state, str(checkpoint))
    model = ARCH_MODEL_REGISTRY.get(name)
    if model is None or not issubclass(model, RobertaModel):
        raise ValueError(f"CHECKPOINT is {checkpoint}, of a {name}; {allowed}")
    check_configuration(state, str(checkpoint))
    hub = model.from_pretrained(str(checkpoint.parent.absolute()), checkpoint.name, str(data.absolute()), bpe=None)
    if not isinstance(hub.task, SpanExtractionTask):
        raise ValueError(f"CHECKPOINT is {checkpoint}, of --task {hub.cfg.task._name}; {allowed}")
    return hub.eval()


@torch.no_grad()
def answer(hub: RobertaHubInterface, split: str, batch_size: int) -> tuple[dict[str, str], Scores]:
    """The answers to the questions of a split, by their names, and what they are worth.

    Raises:
        ValueError: the folder of the task lacks the split, or it is damaged.
    """
    dataset = hub.task.load_dataset(split)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = hub.model.to(device)
    texts, scores, questions = [], [], []
    order = np.argsort(-dataset.sizes, kind="stable")  # windows of like lengths together
    with tqdm(total=len(dataset), desc="  windows", unit="", leave=False, disable=None) as bar:
        for begin in range(0, len(dataset), batch_size):
            sample = dataset.collater([dataset[index] for index in order[begin : begin + batch_size]])
            sample = apply_to_sample(lambda tensor: tensor.to(device), sample)
            found, best = hub.task.answer_spans(hub.task.span_scores(model, sample), sample)
            texts += found
            scores.append(best.cpu().numpy())
            questions.append(sample["question"].cpu().numpy())
            bar.update(len(found))
    asked = dataset.split.questions
    numbers = np.concatenate(questions)
    chosen = best_of_each(numbers, np.concatenate(scores))
    answers = {asked[numbers[place]].name: texts[place] for place in chosen}
    return answers, score(answers, {question.name: question.answers for question in asked})


def table(checkpoints: Sequence[Path], scores: Sequence[Scores], split: str) -> Table:
    """A row for each checkpoint."""
    best = max(scores, key=lambda one: one.f1)
    rows = [
        (str(path), f"{one.f1:.2f}", f"{one.em:.2f}", "yes" if one is best else "")
        for path, one in zip(checkpoints, scores)
    ]
    notes = [f"per cent of {best.questions:,d} questions of {split}"]
    if best.missing:
        notes.append(f"{best.missing:,d} questions have no document here, and so no answer; they count as 0")
    return Table("Answers", ("checkpoint", "F1", "exact match", "best"), rows, notes)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="one for each learning rate")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="data-bin of recipes.triviaqa.prepare")
    parser.add_argument("--split", default="valid", help="which questions (%(default)s)")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="windows at once (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the answers, as JSON from name to text")
    return parser


@script("answer")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    started = time.monotonic()
    if options.output is not None:
        check_new(options.output, "--output")
    found = []
    for path in options.checkpoints:
        found.append(answer(load(path, options.data), options.split, options.batch_size))
    run = describe_run(command_line(COMMAND, arguments), time.monotonic() - started)
    print(as_text([table(options.checkpoints, [scores for _, scores in found], options.split)], run))
    if options.output is not None:
        answers, _ = max(found, key=lambda one: one[1].f1)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_lines(options.output, [json.dumps(answers, indent=1, ensure_ascii=False) + "\n"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
