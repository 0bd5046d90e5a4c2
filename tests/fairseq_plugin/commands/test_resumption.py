"""A training that is stopped in the middle of an epoch and goes on is the training that was never stopped.

To the last bit of weights and optimizer, for everything that draws random numbers. fairseq seeds torch's generator by
the number of each update; what else a result depends on must be in the checkpoint.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from recipes.lra.data import dictionary, write
from tests.fairseq_plugin.helpers import episodes, pixels, series, spans
from tests.fairseq_plugin.helpers.commands import (
    NO_READER_THREAD,
    USER_DIR,
    masked_training_command,
    run_in_turn,
    training_command,
    translation_training_command,
)

pytestmark = pytest.mark.usefixtures("plain_pytorch")
PROGRAM = str(Path(__file__).parents[1] / "helpers" / "resumed_trainings.py")
DROPOUT = "--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1".split()
#: Eight updates of two batches each, which are between two and three epochs.
LENGTH = "--max-update 8 --update-freq 2 --disable-validation --no-epoch-checkpoints".split()
ALWAYS = [*LENGTH, *DROPOUT, *NO_READER_THREAD]
#: fairseq's own tasks else keep the batches of the epoch in which a process began.
OWN_BATCHES = ["--update-epoch-batch-itr", "True"]
TEXT = ["--tokens-per-sample", "24", "--max-tokens", "480", *ALWAYS, *OWN_BATCHES]
CHECKPOINTED = ["--checkpoint-activations"]
DECAYED = ["daft_conv_lm", "--lineartime-decay-linear-only", "--weight-decay", "0.5"]
NUMBERS = "--cpu --seed 1 --log-format json --log-interval 1 --optimizer adam --lr 1e-3".split()
ARENA = (
    "--criterion sentence_prediction --num-classes 2 --init-token 0 --max-positions 10 --batch-size 8 "
    "--encoder-embed-dim 8 --encoder-attention-dim 8 --encoder-layers 1"
).split()
PIXELS = (
    "--task pixel_modeling --arch rfa_lm --tokens-per-sample 60 --batch-size 8 --required-batch-size-multiple 1 "
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1 --decoder-attention-heads 2"
).split()

#: Language models: what draws random numbers of its own, and what decides which layers and weights take part.
LANGUAGE_MODELS = {
    "favor, redrawn and recomputed": ("favor_lm", "--favor-redraw", "4", *CHECKPOINTED),
    "rfa_gate": ("rfa_gate_lm", *CHECKPOINTED),
    "reformer": ("reformer_lm",),
    "free biases": ("daft_full_lm", "--daft-free-bias"),
    "selection": ("daft_conv_lm", "--daft-gumbel-temperature", "0.5", "--attention-dropout", "0"),
    "decay of linear layers": tuple(DECAYED),
    "layer drop": ("rfa_lm", "--decoder-layerdrop", "0.3", "--quant-noise-pq", "0.1", *CHECKPOINTED),
}
MASKED = {"masks, random chunks and layer drop": ("bigbird_mlm", "--encoder-layerdrop", "0.3", *CHECKPOINTED)}
STREAMS = ["--task", "streaming_language_modeling", "--tokens-per-sample", "24", "--batch-size", "16", *ALWAYS]
STREAMS += ["--flow-short-conv", "3", *CHECKPOINTED]
TASKS = ("translation", "series", "decision", "decision with workers", "pairs", "spans", "pixels")
STREAMING = {"streams": "0", "streams with workers": "2"}


def write_pairs(folder: Path) -> str:
    """Pairs of random symbols; the label says with which one the first sequence begins."""
    rng = np.random.default_rng(1)

    def examples(count):
        for _ in range(count):
            sequences = [rng.integers(0, 3, rng.integers(2, 9)) for _ in range(2)]
            yield sequences, int(sequences[0][0] == 0)

    write(folder, {"train": examples(48), "valid": examples(8)}, dictionary("abc"), range(2))
    return str(folder / "data-bin")


@pytest.fixture(scope="module")
def found(data_bin: str, pairs_bin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the program found of every training; together they cost most of a minute."""
    root = tmp_path_factory.mktemp("resumption")
    to = {name: str(root / "runs" / name) for name in (*LANGUAGE_MODELS, *MASKED, *STREAMING, *TASKS)}
    cases = {
        name: training_command(data_bin, to[name], arch, *TEXT, *more)
        for name, (arch, *more) in LANGUAGE_MODELS.items()
    }
    for name, (arch, *more) in MASKED.items():
        cases[name] = masked_training_command(data_bin, to[name], arch, *TEXT, *more)
    for name, workers in STREAMING.items():
        cases[name] = training_command(data_bin, to[name], "flowformer_lm", *STREAMS, "--num-workers", workers)
    cross = ["--max-tokens", "600", "--lineartime-cross-attention", "favor", *OWN_BATCHES]
    cases["translation"] = translation_training_command(pairs_bin, to["translation"], "rfa", *ALWAYS, *cross)
    series.write_waves(root / "waves")
    cases["series"] = series.training_command(root / "waves", to["series"], "rfa_time_series", *ALWAYS)
    episodes.write_episodes(root / "episodes")
    windows = [*ALWAYS, "--windows-per-epoch", "192"]
    for name, workers in (("decision", "0"), ("decision with workers", "2")):
        more = [*windows, "--num-workers", workers]
        cases[name] = episodes.training_command(root / "episodes", to[name], "rfa_decision", *more)
    pairs = "--task sequence_pair_prediction --arch rfa_lra_retrieval".split()
    cases["pairs"] = [write_pairs(root / "pairs"), "--user-dir", USER_DIR, *pairs, *ARENA, *NUMBERS, *ALWAYS]
    cases["pairs"] += ["--save-dir", to["pairs"]]
    data = str(pixels.write_pixels(root / "pixels"))
    cases["pixels"] = [data, "--user-dir", USER_DIR, *PIXELS, *NUMBERS, *ALWAYS, "--save-dir", to["pixels"]]
    words = ["--batch-size", "40", *ALWAYS]
    cases["spans"] = spans.training_command(spans.write_names(root / "spans"), to["spans"], "flash_mlm", *words)
    (root / "cases.json").write_text(json.dumps(cases))
    (output,) = run_in_turn((PROGRAM, [str(root / "cases.json")], ""))
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith("RESUMED ")]
    return {name: one for line in lines for name, one in json.loads(line).items()}


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *MASKED, *STREAMING, *TASKS])
def test_it_goes_on_as_if_it_had_never_stopped(found: dict[str, dict], name: str) -> None:
    """The second epoch was not over when it stopped, and the third begins after that."""
    one = found[name]
    assert 1 < one["epochs"] < 2, "it was to be stopped in its second epoch"
    assert len(one["whole"]) == 8 and one["resumed"] == one["whole"][5:]
    assert one["differs"] == []
