"""Every task of the plugin: toy data, a small training of each, and tasks as a command line sets them up."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import FairseqTask

import fairseq_plugin  # noqa: F401  registers the tasks
from recipes.lra.data import dictionary
from recipes.lra.data import write as write_examples
from recipes.texts import write_split

from . import episodes, pixels, series, spans, text
from .language_models import SMALL

_STILL = "--dropout 0 --attention-dropout 0"
_TEXT = f"--tokens-per-sample 16 --sample-break-mode eos {_STILL}"
_BLOCKS = f"--arch flowformer_lm --criterion cross_entropy {_STILL} --tokens-per-sample"
_ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --dropout 0"
_HEADS = f"{_ENCODER} --encoder-attention-heads 2"
_DECISION = "--decoder-layers 1 --decoder-embed-dim 16 --dropout 0 --context 5 --windows-per-epoch 40"
#: A folder that ``write`` makes, and arguments of fairseq-train: of each task, and of each criterion without a teacher.
COMMANDS = {
    "pixels": f"pixels --task pixel_modeling {_BLOCKS} {pixels.SHAPE.length}",
    "spans": " ".join(("spans", *spans.TASK, *spans.WINDOWS, "--arch flash_mlm", _ENCODER)),
    "pairs": "pairs/data-bin --task sequence_pair_prediction --criterion sentence_prediction --num-classes 2 "
    f"--init-token 0 --arch flow_lra_retrieval --max-positions 16 {_HEADS}",
    "series": f"series --task time_series_classification --criterion sentence_prediction --arch flow_time_series "
    f"{_HEADS}",
    "episodes": "episodes --task offline_rl --criterion action_mse --arch flow_decision --decoder-attention-heads 2 "
    f"{_DECISION}",
    "context_parallel": f"text --task context_parallel_language_modeling --lineartime-context-parallel 2 {_BLOCKS} 11",
    "streams": f"text --task streaming_language_modeling {_BLOCKS} 8",
    "prompted": f"text --task prompted_language_modeling --arch flowformer_lm {_TEXT}",
    "masked": f"text --task masked_lm --criterion masked_lm --mask-prob 0.5 --arch flash_mlm {_TEXT} {_ENCODER}",
    "sparse_cross_entropy": "text --task language_modeling --arch daft_conv_lm --criterion sparse_cross_entropy "
    f"--entropy-weight 1 {_TEXT}",
    "awac": f"episodes --task offline_rl --criterion awac --arch awac_decision {_DECISION}",
}


def write(folder: Path) -> Path:
    """Make the data of all trainings in ``folder``; the last block of the text is short."""
    rng = np.random.default_rng(1)
    lengths = (7, 7, 7, 9, 5, 11, 7, 9)
    lines = [np.append(rng.integers(4, 60, length - 1), 2).astype(np.int32) for length in lengths]
    (folder / "text").mkdir()
    text.dictionary().save(str(folder / "text" / "dict.txt"))
    write_split(folder / "text", "train", lines, 64)
    pixels.write_pixels(folder / "pixels")
    sizes = ((4, 6), (4, 6), (3, 6), (5, 2), (4, 6))
    examples = [([rng.integers(0, 3, length) for length in both], i % 2) for i, both in enumerate(sizes)]
    write_examples(folder / "pairs", {"train": examples}, dictionary("abc"), range(2))
    series.write_waves(folder / "series", train=24, test=3)
    spans.write_names(folder / "spans", {"train": 8})
    episodes.write_episodes(folder / "episodes", count=6)
    return folder


def typed(name: str, folder: Path, *arguments: str) -> tuple[FairseqTask, Namespace]:
    """The task of a training of ``COMMANDS`` on data in ``folder``, and what the parser returns; later ones win.

    fairseq-train turns that into another kind of configuration before, which takes a third of a second; see ``set_up``.
    """
    data, *command = COMMANDS[name].split()
    sizes = SMALL if command[command.index("--arch") + 1].endswith("_lm") else ()
    words = [str(folder / data), *command, *sizes, *arguments]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    return tasks.setup_task(args), args


def set_up(data: Path | str, *arguments: str) -> tuple[FairseqTask, Any]:
    """The task of ``fairseq-train DATA ARGUMENTS``, and the configuration."""
    args = options.parse_args_and_arch(options.get_training_parser(), [str(data), *arguments])
    config = convert_namespace_to_omegaconf(args)
    return tasks.setup_task(config.task), config
