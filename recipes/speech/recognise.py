"""Character errors, time and memory of a model of CTC on recordings of several lengths."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import editdistance
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.data_utils import post_process
from torch import Tensor, nn
from tqdm import tqdm

import fairseq_plugin  # noqa: F401  registers the architectures

from ..bench.harness.memory import peak_beyond
from .prepare import split_of_length
from .recordings import RATE


class Read(NamedTuple):
    """Errors, time and memory of a model on all recordings of one length."""

    length: int  # seconds, at most
    cer: float  # character errors in per cent of the characters
    milliseconds: float  # of the processor, for a second of audio
    peak_bytes: int | None  # of the first recording, beyond the model and its input; None: not measured


@torch.no_grad()
def recognise(checkpoint: Path, data: Path, lengths: list[int], memory: bool) -> list[Read]:
    """Let the model in ``checkpoint`` read the test recordings in ``data``, one at a time, on one thread.

    The text is the most probable symbol of each frame, without a language model. The first recording is read once
    before, since the first pass of a process takes longer.
    """
    models, _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides={"data": str(data)})
    model, threads = models[0].eval(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _logits(model, next(_samples(task, min(lengths))))
        return [_read(model, task, length, memory) for length in lengths]
    finally:
        torch.set_num_threads(threads)


def _read(model: nn.Module, task: Any, length: int, memory: bool) -> Read:
    dictionary = task.target_dictionary
    errors = characters = samples = peak = 0
    seconds = 0.0
    for i, sample in enumerate(tqdm(_samples(task, length), f"recognise {length} s", leave=False, disable=None)):
        started = time.process_time()
        [logits] = _logits(model, sample)
        seconds += time.process_time() - started
        samples += sample["net_input"]["source"].shape[1]
        text, right = (
            post_process(dictionary.string(x), "letter")
            for x in (collapsed(logits[:, 0].argmax(-1), dictionary.index(task.blank_symbol)), sample["target"][0])
        )
        errors += editdistance.eval(text, right)
        characters += len(right)
        if memory and i == 0:
            peak = peak_beyond(partial(_logits, model, sample), "cpu")
    cer, milliseconds = 100.0 * errors / characters, 1000.0 * seconds / (samples / RATE)
    return Read(length, cer, milliseconds, peak if memory else None)


def _samples(task: Any, length: int) -> Iterator[dict[str, Any]]:
    """The test recordings of ``length`` seconds, each as a batch."""
    split = split_of_length(length)
    task.load_dataset(split)
    dataset = task.dataset(split)
    return (dataset.collater([dataset[i]]) for i in range(len(dataset)))


def _logits(model: nn.Module, sample: dict[str, Any]) -> list[Tensor]:
    """The scores of symbols (T, 1, symbols) for each frame, in a list."""
    return [model.get_logits(model(**sample["net_input"]))]


def collapsed(symbols: Tensor, blank: int) -> Tensor:
    """The symbols (T,) of frames without repetitions and then without blanks, as CTC defines it."""
    symbols = symbols.unique_consecutive()
    return symbols[symbols != blank]
