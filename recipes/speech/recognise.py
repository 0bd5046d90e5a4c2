"""Print errors, time and memory of models of CTC by the length of recordings: ``python -m recipes.speech.recognise``.

The text is the most probable symbol of each frame, without a language model. Prints a line of JSON for each length.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import editdistance
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.data_utils import post_process
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures

from .. import runs
from .data import RATE


@torch.no_grad()
def recognise(checkpoint: Path, data: Path, lengths: list[int]) -> list[dict[str, float]]:
    """Let the model in ``checkpoint`` read the test recordings in ``data``, one at a time."""
    [model], _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides={"data": str(data)})
    model.eval()
    for length in lengths:
        task.load_dataset(f"test_{length}")
    logits(model, batches(task, min(lengths))[0])  # the first pass of a process takes longer
    return [{"length": length, **read(model, task, length)} for length in lengths]


def read(model: nn.Module, task: Any, length: int) -> dict[str, float]:
    """Errors in per cent of the characters, processor's ms for a second of audio, and MiB of the first recording."""
    dictionary, samples = task.target_dictionary, batches(task, length)
    errors = characters = frames = 0
    seconds = 0.0
    for sample in samples:
        started = time.process_time()
        scores = logits(model, sample)
        seconds += time.process_time() - started
        frames += sample["net_input"]["source"].shape[1]
        symbols = collapsed(scores[:, 0].argmax(-1), dictionary.index(task.blank_symbol))
        text, right = (post_process(dictionary.string(x), "letter") for x in (symbols, sample["target"][0]))
        errors += editdistance.eval(text, right)
        characters += len(right)
    peak = runs.peak_bytes(partial(logits, model, samples[0])) / 2**20
    return {"cer": 100 * errors / characters, "ms": 1000 * seconds / (frames / RATE), "MiB": peak}


def batches(task: Any, length: int) -> list[dict[str, Any]]:
    """The test recordings of ``length`` seconds, each as a batch."""
    dataset = task.dataset(f"test_{length}")
    return [dataset.collater([dataset[i]]) for i in range(len(dataset))]


def logits(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    """The scores of symbols (T, 1, symbols) for each frame."""
    return model.get_logits(model(**sample["net_input"]))


def collapsed(symbols: Tensor, blank: int) -> Tensor:
    """The symbols (T,) of frames without repetitions and then without blanks, as CTC defines it."""
    symbols = symbols.unique_consecutive()
    return symbols[symbols != blank]


def main() -> None:
    """Print what each checkpoint reads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="seconds of the test recordings")
    options = parser.parse_args()
    for checkpoint in options.checkpoints:
        for result in recognise(checkpoint, options.data, options.lengths):
            print(json.dumps({"checkpoint": str(checkpoint), **result}))


if __name__ == "__main__":
    main()
