"""Answer questions with trained models: ``python -m recipes.triviaqa.answer CHECKPOINT --data DIR --output FILE``.

Several checkpoints, for example of several learning rates, are compared. The answers of the one with the highest F1 are
written in the format of TriviaQA's own evaluation.
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
from common.files.output_files import check_new
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
    """Load a checkpoint of ``--task span_extraction`` for evaluation, with the task's data in the folder ``data``.

    Raises:
        ValueError: the file does not exist, cannot be read, or was trained for another task.
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
    """Answer the questions of a split; returns the answers by name of the question, and their scores.

    Raises:
        ValueError: the split is missing from the task's folder, or damaged.
    """
    dataset = hub.task.load_dataset(split)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = hub.model.to(device)
    texts, scores, questions = [], [], []
    order = np.argsort(-dataset.sizes, kind="stable")  # batches windows of similar length
    with tqdm(total=len(dataset), desc="  windows", unit="", leave=False, disable=None) as bar:
        for begin in range(0, len(dataset), batch_size):
            sample = dataset.collater([dataset[index] for index in order[begin : begin + batch_size]])
            sample = apply_to_sample(lambda tensor: tensor.to(device), sample)
            batch_texts, batch_scores = hub.task.answer_spans(hub.task.span_scores(model, sample), sample)
            texts += batch_texts
            scores.append(batch_scores.cpu().numpy())
            questions.append(sample["question"].cpu().numpy())
            bar.update(len(batch_texts))
    split_questions = dataset.split.questions
    question_indices = np.concatenate(questions)
    best_windows = best_of_each(question_indices, np.concatenate(scores))
    answers = {split_questions[question_indices[window]].name: texts[window] for window in best_windows}
    return answers, score(answers, {question.name: question.answers for question in split_questions})


def table(checkpoints: Sequence[Path], scores: Sequence[Scores], split: str) -> Table:
    """The table of scores, with one row per checkpoint."""
    best = max(scores, key=lambda one: one.f1)
    rows = [
        (
            str(path),
            f"{checkpoint_scores.f1:.2f}",
            f"{checkpoint_scores.em:.2f}",
            "yes" if checkpoint_scores is best else "",
        )
        for path, checkpoint_scores in zip(checkpoints, scores)
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
    results = []
    for path in options.checkpoints:
        results.append(answer(load(path, options.data), options.split, options.batch_size))
    run = describe_run(command_line(COMMAND, arguments), time.monotonic() - started)
    print(as_text([table(options.checkpoints, [scores for _, scores in results], options.split)], run))
    if options.output is not None:
        answers, _ = max(results, key=lambda one: one[1].f1)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_lines(options.output, [json.dumps(answers, indent=1, ensure_ascii=False) + "\n"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
