"""Time to generate a translation by the length of its source, of all models of a comparison in turns."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq import tasks
from fairseq.sequence_generator import SequenceGenerator
from tqdm import tqdm

from ..bench.harness.timing import interleave, quartiles, ratio, synchronizer
from ..shared.encoder_decoders import STOCK, EncoderDecoders
from ..shared.fairseq_models import model_options

#: Subwords of every translation, </s> included.
STEPS = 32


class Speed(NamedTuple):
    """One model and one length of the source."""

    model: str
    length: int
    milliseconds: float  # the median
    faster: float | None  # how many times as long fairseq's model takes in the same rounds; None without it


def measure(options: EncoderDecoders, data: Path, lengths: Sequence[int]) -> list[Speed]:
    """Time every model of ``options``, built as for its training, with new weights; on one thread.

    A translation is what fairseq-generate does for one source: the encoder, then ``STEPS`` steps of a beam.
    """
    speeds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for length in tqdm(lengths, desc="speed", unit=" lengths", leave=False, disable=None):
            functions = [translating(options, data, name, length) for name in options.models]
            times = dict(zip(options.models, interleave(functions, synchronizer("cpu"))))
            for name, seconds in times.items():
                faster = ratio(seconds, times[STOCK]) if STOCK in times else None
                speeds.append(Speed(name, length, 1000.0 * quartiles(seconds)[1], faster))
    finally:
        torch.set_num_threads(threads)
    return speeds


def translating(options: EncoderDecoders, data: Path, name: str, length: int) -> Callable[[], object]:
    """A function that generates a translation of ``length`` random subwords, the last of them </s>."""
    positions = max(length, STEPS) + 1
    arguments = [data, *options.model_arguments(name)]
    # argparse takes the last value of an option.
    arguments += ["--max-source-positions", positions, "--max-target-positions", positions]
    parsed = model_options(arguments)
    task = tasks.setup_task(parsed)
    torch.manual_seed(1)
    model = task.build_model(parsed).eval()
    model.make_generation_fast_(need_attn=False)  # as fairseq-generate does
    words = task.target_dictionary
    # No hypothesis ends before the last step, and all end there.
    ending = {"max_len_a": 0, "max_len_b": STEPS - 1, "min_len": STEPS - 1}
    generator = SequenceGenerator([model], words, beam_size=options.beam, **ending)
    tokens = torch.randint(words.nspecial, len(words), (1, length), generator=torch.Generator().manual_seed(2))
    tokens[0, -1] = words.eos()
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([length])}}
    return lambda: generator.generate([model], sample)
