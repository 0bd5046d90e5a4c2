"""Every task refuses the command lines that it cannot honour before it trains, in one line."""

from pathlib import Path

import pytest

from fairseq_plugin.data.pixels import SHAPE_FILE
from tests.fairseq_plugin.helpers import unequal_batches
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.spans import TASK as SPANS
from tests.fairseq_plugin.helpers.spans import WINDOWS
from tests.fairseq_plugin.helpers.tasks import set_up

SMALL_ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
#: The folder of ``unequal_batches.write`` and the arguments of a training of each task.
COMMANDS = {
    "pixels": f"--task pixel_modeling --arch flowformer_lm --tokens-per-sample 60 {' '.join(SMALL)}",
    "spans": f"{' '.join([*SPANS, *WINDOWS])} --arch flash_mlm {SMALL_ENCODER.partition(' --encoder-att')[0]}",
    "pairs": "--task sequence_pair_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 "
    f"--arch flow_lra_retrieval --max-positions 10 {SMALL_ENCODER}",
    "series": f"--task time_series_classification --criterion sentence_prediction --arch linear_time_series "
    f"{SMALL_ENCODER}",
    "episodes": "--task offline_rl --criterion action_mse --arch linear_decision",
    "text": "--task context_parallel_language_modeling --lineartime-context-parallel 2 --arch flowformer_lm "
    f"--tokens-per-sample 16 {' '.join(SMALL)}",
    "streams": "--task streaming_language_modeling --arch flowformer_lm --tokens-per-sample 16 " + " ".join(SMALL),
}
FOLDERS = {"streams": "text", "pairs": "pairs/data-bin"}
#: Arguments that are refused, and what the message says of them.
REFUSED = {
    "pixels": {
        "--tokens-per-sample 59": "--tokens-per-sample is 59 .*--context-window, if given.*; allowed: 60",
        "--sample-break-mode eos": "--sample-break-mode is eos; allowed with --task pixel_modeling: none",
        "--shorten-method truncate": "--shorten-method is truncate; allowed",
        "--add-bos-token": "--add-bos-token is True; allowed",
        "--past-target": "--past-target is True; allowed",
        "--self-target": "--self-target is True; allowed",
        "--pad-to-fixed-bsz": "--pad-to-fixed-bsz is True; allowed",
        "--output-dictionary-size 100": "--output-dictionary-size is 100; allowed",
        "--pixel-max-shift -1": "--pixel-max-shift is -1; allowed: 0..255",
        "--pixel-max-shift 256": "--pixel-max-shift is 256; allowed: 0..255",
    },
    "spans": {
        "--max-positions 9": "--max-positions is 9; allowed: at least 10, for <s>, a question of 6 tokens",
        "--max-positions 0": "--max-positions is 0; allowed",
        "--max-question-length 0": "--max-question-length is 0; allowed",
        "--max-answer-length 0": "--max-answer-length is 0; allowed",
        "--span-stride 0": "--span-stride is 0; allowed",
        "--span-stride 24": "--span-stride is 24; allowed: at most 23, the tokens of a document in a window of 32",
        "--arch flow_classifier": "--arch is flow_classifier; allowed with --task span_extraction: roberta",
        "--arch flow_time_series": "--arch is flow_time_series; allowed with --task span_extraction: roberta",
        "--criterion sentence_prediction": "--criterion is sentence_prediction; allowed with --task span_extraction",
    },
    "pairs": {
        "--num-classes 0": "--num-classes is 0",
        "--max-positions 0": "--max-positions is 0",
        "--regression-target": "--regression-target is given; allowed with --task sequence_pair_prediction",
        "--criterion cross_entropy": "--criterion is cross_entropy; allowed with --task sequence_pair_pred",
    },
    "series": {
        "--max-length 0": "--max-length is 0; allowed",
        "--arch flow_classifier": "--arch is flow_classifier; allowed .*: .*flowformer_time_series",
        "--criterion cross_entropy": "--criterion is cross_entropy; allowed .*: sentence_prediction",
    },
    "episodes": {
        "--context 0": "--context is 0.*; allowed",
        "--context all": "--context is all.*; allowed",
        "--max-episode-length 0": "--max-episode-length is 0.*; allowed",
        "--windows-per-epoch 0": "--windows-per-epoch is 0.*; allowed",
        "--return-scale 0": "--return-scale is 0.*; allowed",
        "--arch flow_classifier": "--arch is flow_classifier; allowed .*: .*flowformer_decision",
        "--criterion cross_entropy": "--criterion is cross_entropy; allowed .*: action_mse",
        "--arch awac_decision": "--criterion is action_mse; allowed .* this --arch: awac",
        "--arch bc_decision --criterion awac": "--criterion is awac; allowed .* this --arch: action_mse",
    },
    "text": {
        "--lineartime-context-parallel 0": "--lineartime-context-parallel is 0; allowed",
        "--lineartime-context-timeout 0": "--lineartime-context-timeout is 0; allowed",
        "--past-target": "--lineartime-context-parallel is 2; allowed with .*--past-target",
        "--sentence-avg": "--sentence-avg is given; allowed",
        "--lineartime-reset-at-eos": "--lineartime-reset-at-eos is given; allowed with .*-parallel 2: not given",
        "--arch softmax_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
        "--arch transformer_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
        "--arch flash_quad_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
        "--arch daft_full_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
    },
    "streams": {
        "--sample-break-mode eos": "--sample-break-mode is eos; allowed .* none",
        "--add-bos-token": "--add-bos-token is True; allowed",
        "--shorten-method truncate": "--shorten-method is truncate",
        "--self-target": "--self-target is True",
    },
}
#: Folders without a file, and what the message says of it.
MISSING = {
    ("pixels", SHAPE_FILE): f"lacks {SHAPE_FILE}; allowed",
    ("spans", "dict.txt"): "dict.txt does not exist; allowed: a folder that .*recipes.triviaqa.data",
    ("pairs", "input0/dict.txt"): "input0.dict.txt does not exist; allowed.*--destdir .*input0",
    ("pairs", "label/dict.txt"): "label.dict.txt does not exist; allowed.*--destdir .*label",
    ("pairs", "input1"): "input1.train.idx does not exist; allowed.*fairseq-preprocess .*--srcdict",
    ("series", "series.json"): "lacks series.json",
    ("episodes", "episodes.json"): "lacks episodes.json",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small data for every task."""
    folder = tmp_path_factory.mktemp("tasks")
    unequal_batches.write(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name, refused in REFUSED.items() for arguments in refused]
)
def test_command_lines_that_are_refused(name: str, arguments: str, data: Path) -> None:
    """By the task, for its model or for its criterion: the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=REFUSED[name][arguments]):
        folder = data / FOLDERS.get(name, name)
        task, config = set_up(folder, *COMMANDS[name].split(), "--num-workers", "0", *arguments.split())
        task.build_model(config.model)
        task.build_criterion(config.criterion)


@pytest.mark.parametrize(("name", "file"), MISSING)
def test_folders_that_lack_a_file(name: str, file: str, data: Path, tmp_path: Path) -> None:
    """What is missing is named, and what makes it."""
    folder = data / FOLDERS.get(name, name)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_relative_to(folder / file):
            (tmp_path / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(folder)).symlink_to(path)
    with pytest.raises(ValueError, match=MISSING[name, file]):
        task, _ = set_up(tmp_path, *COMMANDS[name].split())
        task.load_dataset("train")
