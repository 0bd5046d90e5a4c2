"""Every fairseq command with an encoder-decoder, as a user runs it."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from fairseq_plugin import LinearTimeTransformer
from tests.fairseq_plugin.helpers.commands import (
    USER_DIR,
    run_in_turn,
    run_two_processes,
    translation_training_command,
)
from tests.fairseq_plugin.helpers.logs import losses
from tests.fairseq_plugin.helpers.tasks import set_up

CROSS = "--lineartime-cross-attention"
#: A layer with fairseq's own cross-attention and one with ours differ in what commands do; the sums inside do not. A
#: named size's checkpoint holds every option, and with nystrom the decoder has another mechanism. fairseq pads on
#: the left by default, and on the right where it is given --left-pad-source.
TRAINED = {
    "softmax": ("nystrom_iwslt_de_en", "--share-decoder-input-output-embed"),
    "flow_source": ("linear", CROSS, "flow_source", "--linear-short-conv", "3", "--left-pad-source"),
}
SENTENCES = "w3 w21 w28 w5\nw5\n"


class Trained(NamedTuple):
    """A short training, and what the other commands made of its checkpoint."""

    cross: str
    folder: Path
    outputs: dict[str, str]


@pytest.fixture(scope="module", params=TRAINED)
def trained(request: pytest.FixtureRequest, pairs_bin: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The outputs of train, resume, validate, generate in several ways, and interactive."""
    folder = tmp_path_factory.mktemp(request.param)
    arch, *arguments = TRAINED[request.param]
    smoothed = ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
    train = translation_training_command(pairs_bin, str(folder), arch, *smoothed, *arguments)
    checkpoint = folder / "checkpoint_last.pt"
    base = [pairs_bin, "--user-dir", USER_DIR, "--task", "translation", "--path", str(checkpoint), "--cpu"]
    generate = [*base, "--batch-size", "7", "--max-len-b", "12", "--required-batch-size-multiple", "1"]
    ensemble = [*generate, "--path", f"{checkpoint}:{folder / 'checkpoint_best.pt'}"]
    alignment = ["--print-alignment"] if request.param == "softmax" else []
    commands = {
        "train": ("fairseq_cli.train", train, ""),
        "resume": ("fairseq_cli.train", [*train, "--max-update", "9", "--checkpoint-activations"], ""),
        "validate": ("fairseq_cli.validate", [*base, "--max-tokens", "384", "--log-format", "json"], ""),
        "beam": ("fairseq_cli.generate", [*generate, "--beam", "4", "--nbest", "2", *alignment], ""),
        "prefix": ("fairseq_cli.generate", [*generate, "--beam", "3", "--prefix-size", "2"], ""),
        "ensemble": ("fairseq_cli.generate", [*ensemble, "--beam", "2"], ""),
        "interactive": ("fairseq_cli.interactive", [*base, "--beam", "3", "--max-len-b", "9"], SENTENCES),
    }
    return Trained(request.param, folder, dict(zip(commands, run_in_turn(*commands.values()))))


def hypotheses(output: str) -> dict[int, list[str]]:
    """The words of the hypotheses for each line."""
    found: dict[int, list[str]] = {}
    for line, words in re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, flags=re.MULTILINE):
        found.setdefault(int(line), []).append(words)
    return found


def test_training_and_resuming(trained):
    first, second = losses(trained.outputs["train"]), losses(trained.outputs["resume"])
    assert len(first) == 6 and first[-1] < first[0]
    assert len(second) == 3  # updates 7 to 9 of a training that goes on


def test_generation(trained):
    assert all(len(found) == 2 for found in hypotheses(trained.outputs["beam"]).values())
    for command in ("beam", "prefix", "ensemble"):
        assert sorted(hypotheses(trained.outputs[command])) == list(range(20))
    assert sorted(hypotheses(trained.outputs["interactive"])) == [0, 1]


def test_in_python_it_says_what_the_command_says(trained, pairs_bin):
    hub = LinearTimeTransformer.from_pretrained(str(trained.folder), "checkpoint_last.pt", pairs_bin)
    translated = hub.translate(SENTENCES.splitlines(), beam=3, max_len_b=9)
    said = hypotheses(trained.outputs["interactive"])
    assert translated == [said[0][0], said[1][0]]


def test_alignment(trained):
    """Words of the target with those of the source, where there are weights; models/ has the refusal elsewhere."""
    if trained.cross == "softmax":
        assert re.search(r"^A-0\t\d+-\d+", trained.outputs["beam"], flags=re.MULTILINE)


def test_two_processes_learn_in_half_precision(pairs_bin, tmp_path):
    """By fairseq's --fp16 on a CPU, with its own loss scaling."""
    more = ["--fp16", "--fp16-no-flatten-grads", CROSS, "flow_source"]
    output, other = run_two_processes(translation_training_command(pairs_bin, str(tmp_path), "flowformer", *more))
    numbers = losses(output)
    assert len(numbers) == 6 and numbers[-1] < numbers[0] and not losses(other)  # the first one logs
    assert '"loss_scale": "128"' in output


def test_a_language_modeling_task_is_refused(data_bin, tmp_path):
    command = translation_training_command(data_bin, str(tmp_path), "flowformer", "--task", "language_modeling")
    task, config = set_up(*command)
    with pytest.raises(ValueError, match="--task is language_modeling; allowed with --arch flowformer"):
        task.build_model(config.model)
