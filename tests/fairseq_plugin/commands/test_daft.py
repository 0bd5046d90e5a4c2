"""DAFT's language models by fairseq's commands: precision, evaluation, what is refused."""

import json
import math
import re

import pytest

from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn, training_command
from tests.fairseq_plugin.helpers.language_models import DAFT_FAMILY
from tests.fairseq_plugin.helpers.logs import entries, losses

#: Of each architecture what makes most of the state of a training: noise of its own, a loss of two terms.
ARGUMENTS = {
    "daft_full_lm": ["--daft-free-bias"],
    "daft_conv_lm": ["--daft-gumbel-temperature", "0.5", "--criterion", "sparse_cross_entropy"],
}
MODES = {
    "plain": [],
    "fp16": ["--fp16", "--fp16-no-flatten-grads"],
    "checkpointed": ["--checkpoint-activations"],
    "noise": ["--quant-noise-pq", "0.1", "--attention-dropout", "0.1", "--decoder-layerdrop", "0.2"],
}
RUNS = [*(("daft_conv_lm", mode) for mode in MODES), ("daft_full_lm", "plain")]


@pytest.fixture(scope="module")
def trained(data_bin: str, tmp_path_factory: pytest.TempPathFactory):
    """Six updates in every mode, and two evaluations; resumption is in test_resumption.py."""
    root = tmp_path_factory.mktemp("daft")

    def training(arch: str, name: str, *arguments: str):
        options = [*ARGUMENTS[arch], "--no-epoch-checkpoints", "--num-workers", "0", *arguments]
        return "fairseq_cli.train", training_command(data_bin, str(root / arch / name), arch, *options), ""

    commands = {(arch, mode): training(arch, mode, *MODES[mode]) for arch, mode in RUNS}
    for arch in DAFT_FAMILY:
        path = str(root / arch / "plain" / "checkpoint_last.pt")
        evaluation = [data_bin, "--user-dir", USER_DIR, "--cpu", "--tokens-per-sample", "48", "--gen-subset", "valid"]
        for name in ("evaluation", "evaluation again"):
            commands[arch, name] = ("fairseq_cli.eval_lm", [*evaluation, "--path", path], "")
    logs = dict(zip(commands, run_in_turn(*commands.values())))
    return logs


@pytest.mark.parametrize(("arch", "mode"), RUNS)
def test_training_modes(trained, arch: str, mode: str) -> None:
    """Precision, recomputed activations and noise that fairseq allows: a loss that falls, half precision as single."""
    log = trained[arch, mode]
    numbers, plain = losses(log), losses(trained[arch, "plain"])
    assert len(numbers) == 6 and numbers[-1] < numbers[0] - 0.05
    assert ('"loss_scale": "128"' in log) == (mode == "fp16")
    if mode == "fp16":
        assert max(abs(a - b) for a, b in zip(numbers, plain)) < 0.02
    elif mode == "checkpointed":
        assert numbers == plain
    elif mode == "noise":
        assert numbers != plain
    if arch == "daft_conv_lm":
        entropies = [entry["position_entropy"] for entry in entries(log, "train_inner")]
        assert all(abs(entropy - 2 * 4 * math.log(9)) < 0.1 for entropy in entropies)


@pytest.mark.parametrize("arch", DAFT_FAMILY)
def test_evaluation_draws_nothing(trained, arch: str) -> None:
    """fairseq-eval-lm repeats itself, with selection too, and agrees with the last validation."""
    first, again = (
        re.search(r"Perplexity: ([\d.]+)", trained[arch, name]).group(1) for name in ("evaluation", "evaluation again")
    )
    valid = entries(trained[arch, "plain"], "valid")[-1]
    assert first == again and math.isclose(float(first), 2.0 ** valid["valid_loss"], rel_tol=0.01)


# ---- Bad input at the command line

# Each command in turn, whatever becomes of it, and the line that Python would print last.
_FAILING = """
import json, runpy, sys, traceback
for module, arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
        print('\\nLAST ""', flush=True)
    except BaseException as error:
        print("\\nLAST", json.dumps("".join(traceback.format_exception_only(error))), flush=True)
"""
_SPARSE = "--criterion sparse_cross_entropy"
REFUSED: dict[str, list[str]] = {
    "daft_conv_lm --daft-window 0": ["ValueError: --daft-window is 0", "allowed: an integer of at least 1"],
    "daft_conv_lm --decoder-attention-heads 5": ["ValueError: --decoder-attention-heads is 5; allowed: ", "32"],
    f"daft_conv_lm {_SPARSE} --entropy-weight -1": ["ValueError: --entropy-weight is -1.0; allowed"],
    f"flowformer_lm {_SPARSE}": ["ValueError: model is a FlowformerLanguageModel without DAFT-conv; "],
}


@pytest.fixture(scope="module")
def last_lines(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each refused training ends with, and a prompt that is longer than the positions of daft_full_lm."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "long.txt").write_text(" ".join(["w3"] * 60) + "\n")
    full = training_command(data_bin, str(folder), "daft_full_lm", "--max-update", "1", "--num-workers", "0")
    prompted = [data_bin, "--user-dir", USER_DIR, "--cpu", "--task", "language_modeling"]
    prompted += ["--path", str(folder / "checkpoint_last.pt"), "--input", str(folder / "long.txt")]
    commands = {given: training_command(data_bin, str(folder / "none"), *given.split()) for given in REFUSED}
    commands = [("fairseq_cli.train", command) for command in (*commands.values(), full)]
    (folder / "failing.py").write_text(_FAILING)
    every = json.dumps([*commands, ("fairseq_cli.interactive", prompted)])
    (output,) = run_in_turn((str(folder / "failing.py"), [every], ""))
    lines = map(json.loads, re.findall(r"^LAST (.*)$", output, re.MULTILINE))
    return dict(zip([*REFUSED, "training", "prompt"], lines))


@pytest.mark.parametrize("given", REFUSED)
def test_one_line_says_what_is_refused(last_lines: dict[str, str], given: str) -> None:
    """The argument, what was given, what is allowed."""
    assert len(last_lines[given].strip().splitlines()) == 1
    assert all(part in last_lines[given] for part in REFUSED[given]), last_lines[given]


def test_a_prompt_longer_than_the_positions(last_lines: dict[str, str]) -> None:
    """fairseq-interactive names both lengths of what daft_full_lm cannot hold."""
    assert last_lines["training"] == ""
    assert "(=61)" in last_lines["prompt"] and "max_positions=48" in last_lines["prompt"]
