"""Every command of fairseq, as a user runs it, with every kind of model: train, validate, evaluate, generate, interact.

How a training resumes is in test_resumption.py, and what an option changes in ../test_every_door.py.
"""

import argparse
import math
import re
from pathlib import Path

import pytest
import sentencepiece
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import data_utils
from torch.nn import functional as F

from fairseq_plugin import (
    FlashMaskedModel,
    FlowformerLanguageModel,
    LinearTimeTransformer,
    PromptedLanguageModelingTask,
    PromptState,
    read_prompt,
)
from tests.fairseq_plugin.helpers.commands import (
    USER_DIR,
    NamedRuns,
    masked_training_command,
    run_in_turn,
    run_named,
    training_command,
    translation_training_command,
)
from tests.fairseq_plugin.helpers.logs import entries, losses, perplexity
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import write_text

BOS = ("--add-bos-token",)
ADAPTIVE = "--criterion adaptive_loss --adaptive-softmax-cutoff 20,40 --ddp-backend legacy_ddp".split()
#: Commands differ by what a layer and a configuration are, not by the attention inside of a layer: fairseq's own layer,
#: and a named size of gated attention units, whose checkpoint holds another kind of configuration; with --add-bos-token
#: a sample of the greatest length is one token longer.
LANGUAGE = {
    "layers": ("flowformer_lm",),
    "units": ("flash_lm_base", *BOS),
    "adaptive softmax": ("flash_lm", *BOS, *ADAPTIVE),
}
#: fairseq's own cross-attention and ours, padding on the left, as by default, and on the right.
PAIRS = {
    "stock cross-attention": ("nystrom_iwslt_de_en", "--share-decoder-input-output-embed"),
    "own cross-attention": (
        *("linear", "--lineartime-cross-attention", "flow_source", "--linear-short-conv", "3", "--left-pad-source"),
    ),
}
#: Precision, accumulation and noise that fairseq allows.
MASKED = {
    "masked layers": ("transformer_pp_mlm",),
    "masked units": ("flash_mlm",),
    "fp16": ("flash_mlm", "--fp16", "--fp16-no-flatten-grads"),
    "memory-efficient fp16": ("flash_mlm", "--memory-efficient-fp16"),
    "amp": ("flash_mlm", "--amp"),
    "noise": (
        "flash_mlm",
        *"--encoder-layerdrop 0.2 --quant-noise-pq 0.1 --attention-dropout 0.1 --checkpoint-activations".split(),
    ),
    "whole sentences": (
        "flash_mlm",
        *"--sample-break-mode complete --untie-weights-roberta --update-freq 2 --max-tokens 192".split(),
    ),
}
TASKS = ("language_modeling", "prompted_language_modeling")
SENTENCES, PROMPTS = "w3 w21 w28 w5\nw5\n", "w3 w21 w28 w5 w6\n\nw5 <pad> w8\nw7 w9 w11\n"
LINES = ["--sample-break-mode", "eos", "--required-batch-size-multiple", "1", "--batch-size", "4"]

pytestmark = pytest.mark.usefixtures("plain_pytorch")


def hypotheses(output: str) -> list[tuple[str, float, str]]:
    """The sentence's number, score and words of each hypothesis that a command printed."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return [(number, float(score), words) for number, score, words in found]


def check_same(output: str, expected: str) -> None:
    """The same hypotheses in both, with the same scores."""
    found, wanted = hypotheses(output), hypotheses(expected)
    assert [(number, words) for number, _, words in found] == [(number, words) for number, _, words in wanted] != []
    assert [score for _, score, _ in found] == pytest.approx([score for _, score, _ in wanted], abs=1e-3)


@pytest.fixture(scope="module")
def trained(data_bin: str, pairs_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """The output of every command, by "COMMAND MODEL", all in one process."""
    folder, commands = tmp_path_factory.mktemp("trained"), {}

    def base(name: str, data: str = data_bin, file: str = "checkpoint_last.pt") -> list[str]:
        return [data, "--user-dir", USER_DIR, "--cpu", "--path", str(folder / name / file)]

    for name, (arch, *options) in LANGUAGE.items():
        task, beam = [*base(name), "--task", "language_modeling", *(BOS if BOS[0] in options else ())], ["--beam", "3"]
        blocks = ["--tokens-per-sample", "48", "--gen-subset", "valid"]
        training = training_command(data_bin, str(folder / name), arch, *options)
        validation = [*task, "--tokens-per-sample", "48", "--max-tokens", "384", "--log-format", "json"]
        typed = [*task, *beam, "--buffer-size", "2", "--max-len-b", "99"]
        commands |= {
            f"train {name}": ("fairseq_cli.train", training, ""),
            f"validate {name}": ("fairseq_cli.validate", validation, ""),
            f"evaluate {name}": ("fairseq_cli.eval_lm", [*task, *blocks], ""),
            f"evaluate in windows {name}": ("fairseq_cli.eval_lm", [*task, *blocks, "--context-window", "40"], ""),
            f"generate {name}": ("fairseq_cli.generate", [*task, *beam, *LINES, "--prefix-size", "3"], ""),
            f"interact {name}": ("fairseq_cli.interactive", typed, SENTENCES),
        }
    for name, (arch, *options) in PAIRS.items():
        smoothed = ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
        training = translation_training_command(pairs_bin, str(folder / name), arch, *smoothed, *options)
        task = [*base(name, pairs_bin), "--task", "translation"]
        generate = [*task, "--batch-size", "7", "--max-len-b", "12", "--required-batch-size-multiple", "1"]
        twice = ":".join([str(folder / name / "checkpoint_last.pt")] * 2)
        alignment = ["--print-alignment"] if name.startswith("stock") else []
        validation = [*task, *smoothed, "--max-tokens", "384", "--log-format", "json"]
        commands |= {
            f"train {name}": ("fairseq_cli.train", training, ""),
            f"validate {name}": ("fairseq_cli.validate", validation, ""),
            f"generate {name}": ("fairseq_cli.generate", [*generate, "--beam", "4", *alignment], ""),
            f"prefix {name}": ("fairseq_cli.generate", [*generate, "--beam", "3", "--prefix-size", "2"], ""),
            f"ensemble {name}": ("fairseq_cli.generate", [*generate, "--beam", "4", "--path", twice], ""),
            f"interact {name}": ("fairseq_cli.interactive", [*task, "--beam", "3", "--max-len-b", "9"], SENTENCES),
        }
    for name, arguments in MASKED.items():
        training = masked_training_command(data_bin, str(folder / name), *arguments)
        commands[f"train {name}"] = ("fairseq_cli.train", training, "")
        if name.startswith("masked"):
            validation = [*base(name), "--task", "masked_lm", "--max-tokens", "384", "--log-format", "json"]
            commands[f"validate {name}"] = ("fairseq_cli.validate", validation, "")
    return run_named(folder, commands)


@pytest.mark.parametrize("name", [*LANGUAGE, *PAIRS, *MASKED])
def test_training_and_validation(trained: NamedRuns, name: str) -> None:
    """The loss falls within a few updates; fairseq-validate finds what the training's own validation found last."""
    numbers, plain = (losses(trained.outputs[f"train {x}"]) for x in (name, "masked units"))
    assert len(numbers) == 6 and numbers[-1] < numbers[0] - (0.05 if name in (*LANGUAGE, *PAIRS) else 0.0)
    assert ('"loss_scale": "128"' in trained.outputs[f"train {name}"]) == ("fp16" in name)
    if name in ("fp16", "memory-efficient fp16", "amp"):
        assert max(abs(a - b) for a, b in zip(numbers, plain)) < 0.02
    if name in ("noise", "whole sentences"):
        assert numbers != plain
    if f"validate {name}" in trained.outputs:
        last, found = (
            entries(trained.outputs[f"{x} {name}"], "valid")[-1]["valid_loss"] for x in ("train", "validate")
        )
        assert math.isclose(found, last, abs_tol=2e-3)


@pytest.mark.parametrize("name", LANGUAGE)
@torch.no_grad()
def test_evaluation(trained: NamedRuns, data_bin: str, name: str) -> None:
    """What fairseq-eval-lm and the validation say is what the checkpoint gives in Python, sample by sample.

    fairseq-eval-lm leaves out the token of --add-bos-token; the validation of a training counts it.
    """
    checkpoint = str(trained.folder / name / "checkpoint_last.pt")
    (model,), _, task = load_model_ensemble_and_task([checkpoint], arg_overrides={"data": data_bin})
    task.load_dataset("valid")
    every = []
    for sample in task.dataset("valid"):
        target = sample["target"][None]
        scores = model.eval().get_normalized_probs(model(sample["source"][None]), True, {"target": target})
        every.append(-scores.gather(-1, target[..., None])[0, :, 0].double() / math.log(2.0))
    bits, added = torch.cat(every).mean().item(), int("bos" in str(LANGUAGE[name]))
    without_bos = torch.cat([x[added:] for x in every]).mean().item()
    assert len(every) > 1 and (bits == without_bos) == (not added)
    found = float(re.search(r"Loss \(base 2\): ([\d.]+)", trained.outputs[f"evaluate {name}"]).group(1))
    assert math.isclose(found, without_bos, abs_tol=2e-4)
    # fairseq's criterion leaves out the second token of each rare cluster: its number there is that of padding.
    validated = entries(trained.outputs[f"train {name}"], "valid")[-1]["valid_loss"]
    assert math.isclose(validated, bits, **({"rel_tol": 0.05} if "adaptive" in name else {"abs_tol": 1e-3}))
    # Another context is another loss, but after six updates not by much.
    assert math.isclose(perplexity(trained.outputs[f"evaluate in windows {name}"]), 2.0**without_bos, rel_tol=0.2)


@pytest.mark.parametrize("name", [*LANGUAGE, *PAIRS])
def test_generation(trained: NamedRuns, pairs_bin: str, name: str) -> None:
    """Every line has its hypotheses; an ensemble of a model and itself is the model; in Python it says the same."""
    ways = ("generate", "prefix", "ensemble") if name in PAIRS else ("generate",)
    for way in ways:
        found = hypotheses(trained.outputs[f"{way} {name}"])
        assert len({number for number, _, _ in found}) == 20 and all(math.isfinite(score) for _, score, _ in found)
    answers = {number: words for number, _, words in hypotheses(trained.outputs[f"interact {name}"])}
    if name in LANGUAGE:
        assert answers["0"].startswith("w3 w21 w28") and answers["1"].startswith("w5")
        return
    check_same(trained.outputs[f"ensemble {name}"], trained.outputs[f"generate {name}"])
    hub = LinearTimeTransformer.from_pretrained(str(trained.folder / name), "checkpoint_last.pt", pairs_bin)
    assert hub.translate(SENTENCES.splitlines(), beam=3, max_len_b=9) == [answers["0"], answers["1"]]
    aligned = re.search(r"^A-0\t\d+-\d+", trained.outputs[f"generate {name}"], flags=re.MULTILINE)
    assert bool(aligned) == name.startswith("stock")  # where there are weights


def test_a_checkpoint_follows_later_defaults(trained: NamedRuns) -> None:
    """An option that nobody set is not stored; and torch reads the namespace of all others."""
    stored = torch.load(trained.folder / "masked units" / "checkpoint_last.pt", weights_only=True)
    assert isinstance(stored["cfg"]["model"], argparse.Namespace)
    assert not hasattr(stored["cfg"]["model"], "flash_kernel")


def test_fill_mask(tmp_path: Path) -> None:
    """RoBERTa's fill_mask, with the sentencepiece model that lies beside the checkpoint, where fairseq finds it."""
    write_text(tmp_path)
    folder, data = tmp_path / "checkpoints", str(tmp_path / "bin")
    folder.mkdir()
    prefix = str(folder / "sentencepiece.bpe")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "train.txt"), model_prefix=prefix, vocab_size=60, minloglevel=2
    )
    encoder = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    for split in ("train", "valid"):
        pieces = encoder.encode((tmp_path / f"{split}.txt").read_text().splitlines(), out_type=str)
        (tmp_path / f"{split}.pieces").write_text("\n".join(" ".join(line) for line in pieces) + "\n")
    splits = [f"--{split}pref={tmp_path / split}.pieces" for split in ("train", "valid")]
    run_in_turn(
        ("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", data, "--workers", "1"], ""),
        ("fairseq_cli.train", masked_training_command(data, str(folder), "flash_mlm"), ""),
    )
    options = {"data_name_or_path": data, "bpe": "sentencepiece"}
    hub = FlashMaskedModel.from_pretrained(str(folder), "checkpoint_last.pt", **options).eval()
    assert hub.decode(hub.encode("w3 w21")) == "w3 w21"
    filled = hub.fill_mask("w3 w21 <mask> w5", topk=5)
    probabilities = [probability for _, probability, _ in filled]
    # fairseq leaves out symbols that are not words.
    assert 2 <= len(filled) <= 5 and 1.0 > probabilities[0] and probabilities == sorted(probabilities, reverse=True)
    assert all(re.fullmatch(r"w3 w21.*w5", text) and "<mask>" not in text for text, _, _ in filled)


@pytest.fixture(scope="module")
def prompted(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """A training by the task of prompts, and what both tasks and a kept state make of prompts."""
    folder, text = tmp_path_factory.mktemp("prompts"), "w3 w21 w28 w5"
    base = [data_bin, "--user-dir", USER_DIR, "--path", str(folder / "checkpoint_best.pt"), "--cpu", "--beam", "3"]
    base += ["--max-len-b", "30", "--task"]
    kept = str(folder / "text.safetensors")
    training = training_command(data_bin, str(folder), "flowformer_lm", "--task", TASKS[1])
    plain = training_command(data_bin, str(folder / "plain"), "flowformer_lm")
    own, lines = [*base, TASKS[1]], [*LINES, "--prefix-size", "4"]
    commands = {"train": ("fairseq_cli.train", training, ""), "train plainly": ("fairseq_cli.train", plain, "")}
    for task in TASKS:
        commands[f"generate {task}"] = ("fairseq_cli.generate", [*base, task, *lines, "--nbest", "3"], "")
        typed = [*base, task, "--nbest", "3", "--buffer-size", "4", "--batch-size", "4"]
        commands[f"interact {task}"] = ("fairseq_cli.interactive", typed, PROMPTS)
    commands |= {
        "keep": ("fairseq_cli.interactive", [*own, "--save-state", kept], f"{text}\n"),
        "after": ("fairseq_cli.interactive", [*own, "--load-state", kept], "w5 w6\n\nw1\n"),
        "whole": ("fairseq_cli.interactive", own, f"{text} w5 w6\n{text}\n{text} w1\n"),
        "generate after": ("fairseq_cli.generate", [*own, *lines, "--load-state", kept], ""),
    }
    return run_named(folder, commands)


def test_prompts_that_are_read_at_once(prompted: NamedRuns, data_bin: str, tmp_path: Path) -> None:
    """The task trains as fairseq's, and generates what fairseq's does; from a kept text what the whole text gives."""
    said = prompted.outputs
    assert losses(said["train"]) == losses(said["train plainly"])
    for command in ("generate", "interact"):
        check_same(said[f"{command} {TASKS[1]}"], said[f"{command} {TASKS[0]}"])
    check_same(said["after"], said["whole"])
    assert all(words.startswith("w3 w21 w28 w5") for _, _, words in hypotheses(said["generate after"]))
    hub = FlowformerLanguageModel.from_pretrained(str(prompted.folder), "checkpoint_best.pt", data_bin).eval()
    assert isinstance(hub.task, PromptedLanguageModelingTask)
    assert hub.sample("w3 w21", beam=2, max_len_b=6).startswith("w3 w21")
    read_prompt(hub, "w3 w21 w28 w5\n", replace_newline_with_eos=True).save(tmp_path / "line.safetensors")
    assert len(PromptState.load(tmp_path / "line.safetensors", hub.models, hub.task.dictionary)) == 5
    for text, word in (("", "no tokens"), ("w5 <pad> w6", "<pad>")):
        with refused_in_one_line(tmp_path, word):
            read_prompt(hub, text)
    state = PromptState.load(prompted.folder / "text.safetensors", hub.models, hub.task.dictionary)
    hub.task = PromptedLanguageModelingTask.of(hub.task, after=state)
    assert len(state) == 4 and hub.sample("w5 w6", beam=3, max_len_b=30) == hypotheses(said["whole"])[0][2]


def test_streams_are_evaluated_as_one_text(data_bin: str, tmp_path: Path) -> None:
    """By fairseq-eval-lm with blocks of any size and workers, and by fairseq-validate; not in windows or rows."""
    task = ["--task", "streaming_language_modeling"]
    rows = "--tokens-per-sample 24 --batch-size 8 --batch-size-valid 2 --attention-dropout 0.1".split()
    base = [data_bin, "--user-dir", USER_DIR, "--path", str(tmp_path / "checkpoint_best.pt"), "--cpu"]
    commands = [("fairseq_cli.train", training_command(data_bin, str(tmp_path), "flowformer_lm", *task, *rows), "")]
    for more in ("24", "31 --num-workers 2", "24 --batch-size 3"):
        commands.append(("fairseq_cli.eval_lm", [*base, *task, "--tokens-per-sample", *more.split()], ""))
    commands.append(("fairseq_cli.validate", [*base, *task, "--valid-subset", "test", "--batch-size", "1"], ""))
    commands.append(("fairseq_cli.eval_lm", [*base, "--tokens-per-sample", "24"], ""))
    trained, blocks, others, in_rows, validated, windows = run_in_turn(*commands)
    assert len(entries(trained, "valid")) == 1 and losses(trained)[-1] < losses(trained)[0]
    hub = FlowformerLanguageModel.from_pretrained(str(tmp_path), "checkpoint_best.pt", data_bin).eval()
    lines = data_utils.load_indexed_dataset(str(Path(data_bin) / "test"), hub.task.dictionary, None)
    text = torch.cat([torch.tensor([hub.task.dictionary.eos()]), *lines]).long()
    with torch.no_grad():
        logits = hub.models[0](text[None, :-1])[0][0]
    whole = 2 ** (float(F.cross_entropy(logits, text[1:])) / math.log(2))
    assert perplexity(blocks) == perplexity(others) == pytest.approx(whole, abs=6e-3)
    assert float(re.findall(r"\| ppl ([\d.]+)", validated)[-1]) == pytest.approx(whole, abs=6e-3)
    assert perplexity(windows) != perplexity(blocks) != perplexity(in_rows)
