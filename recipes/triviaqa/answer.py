"""Answer questions with trained models: ``python -m recipes.triviaqa.answer CHECKPOINT --data DIR --output FILE``.

Several checkpoints, for example of several learning rates, are compared. The answers of the one with the highest F1 are
written in the format of TriviaQA's own evaluation.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.utils import apply_to_sample
from tqdm import tqdm

from common.checkpoints import read_checkpoint
from fairseq_plugin.data.span_answers import best_of_each
from fairseq_plugin.loading.checkpoint_config import check_configuration
from fairseq_plugin.loading.checkpoints import stored_architecture
from fairseq_plugin.tasks.span_extraction import SpanExtractionTask

from ..runs import new_file
from .evaluate import Scores, score


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
    for begin in tqdm(range(0, len(dataset), batch_size), desc="  windows", unit=" batches", leave=False, disable=None):
        sample = dataset.collater([dataset[index] for index in order[begin : begin + batch_size]])
        sample = apply_to_sample(lambda tensor: tensor.to(device), sample)
        batch_texts, batch_scores = hub.task.answer_spans(hub.task.span_scores(model, sample), sample)
        texts += batch_texts
        scores.append(batch_scores.cpu().numpy())
        questions.append(sample["question"].cpu().numpy())
    split_questions = dataset.split.questions
    question_indices = np.concatenate(questions)
    best_windows = best_of_each(question_indices, np.concatenate(scores))
    answers = {split_questions[question_indices[window]].name: texts[window] for window in best_windows}
    return answers, score(answers, {question.name: question.answers for question in split_questions})


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer with each checkpoint, print scores, and write the answers of the best."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="one for each learning rate")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="data-bin of recipes.triviaqa.data")
    parser.add_argument("--split", default="valid", help="which questions")
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once")
    parser.add_argument("--output", type=new_file, metavar="FILE", help="write the answers, as JSON from name to text")
    options = parser.parse_args(arguments)
    try:
        results = [answer(load(path, options.data), options.split, options.batch_size) for path in options.checkpoints]
    except ValueError as error:
        parser.error(str(error))
    answers, best = max(results, key=lambda one: one[1].f1)
    rows = [(str(path), f"{x.f1:.2f}", f"{x.em:.2f}", x is best) for path, (_, x) in zip(options.checkpoints, results)]
    shown = pd.DataFrame(rows, columns=["checkpoint", "F1", "exact match", "best"])
    print(shown.to_markdown(index=False, disable_numparse=True))
    print(
        f"per cent of {best.questions:,d} questions of {options.split}; {best.missing:,d} without a document count as 0"
    )
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
