"""Every command of fairseq, as a user runs it, with every kind of model: train, validate, evaluate, generate, interact.

How a training resumes is in test_resumption.py, and what an option changes in ../test_every_door.py.
"""

import argparse
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import data_utils
from torch.nn import functional as F

from common.attention import position_entropy
from fairseq_plugin import (
    FlashMaskedModel,
    FlowformerLanguageModel,
    LinearTimeLanguageModel,
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
from tests.processes import Command, Forked

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
    "noise and whole sentences": (
        *("flash_mlm", "--encoder-layerdrop", "0.2", "--quant-noise-pq", "0.1", "--attention-dropout", "0.1"),
        *("--checkpoint-activations", "--sample-break-mode", "complete", "--untie-weights-roberta"),
        *("--update-freq", "2", "--max-tokens", "192"),
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
    """Hypotheses and scores are the same in both."""
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
    if name.startswith("noise"):
        assert numbers != plain
    if f"validate {name}" in trained.outputs:
        last, found = (
            entries(trained.outputs[f"{x} {name}"], "valid")[-1]["valid_loss"] for x in ("train", "validate")
        )
        assert math.isclose(found, last, abs_tol=2e-3)


@pytest.mark.parametrize("name", LANGUAGE)
@torch.no_grad()
def test_evaluation(trained: NamedRuns, data_bin: str, name: str) -> None:
    """Losses of fairseq-eval-lm and of validation are those of the checkpoint in Python, sample by sample.

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


def test_fill_mask(trained: NamedRuns, data_bin: str) -> None:
    """RoBERTa's, for words that are whole symbols; fairseq leaves out symbols that are not words."""
    hub = FlashMaskedModel.from_pretrained(str(trained.folder / "masked units"), "checkpoint_last.pt", data_bin).eval()
    hub.bpe = SimpleNamespace(encode=str, decode=str)
    assert hub.decode(hub.encode("w3 w21")) == "w3 w21"
    filled = hub.fill_mask("w3 w21 <mask> w5", topk=5)
    probabilities = [probability for _, probability, _ in filled]
    assert 2 <= len(filled) <= 5 and 1.0 > probabilities[0] and probabilities == sorted(probabilities, reverse=True)
    assert all(re.fullmatch(r"w3 w21 ?w\d+ w5", text) for text, _, _ in filled), filled


def test_prompts_that_are_read_at_once(trained: NamedRuns, data_bin: str, tmp_path: Path) -> None:
    """The task trains as fairseq's, and generates what fairseq's does; from a kept text what the whole text gives."""
    text, kept = "w3 w21 w28 w5", str(tmp_path / "text.safetensors")
    base = [data_bin, "--user-dir", USER_DIR, "--path", str(tmp_path / "checkpoint_best.pt"), "--cpu", "--beam", "3"]
    base += ["--max-len-b", "30", "--task"]
    own, lines = [*base, TASKS[1]], [*LINES, "--prefix-size", "4"]
    training = training_command(data_bin, str(tmp_path), *LANGUAGE["layers"], "--task", TASKS[1])
    commands = {"train": ("fairseq_cli.train", training, "")}
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
    said = run_named(tmp_path, commands).outputs
    assert losses(said["train"]) == losses(trained.outputs["train layers"])
    for command in ("generate", "interact"):
        check_same(said[f"{command} {TASKS[1]}"], said[f"{command} {TASKS[0]}"])
    check_same(said["after"], said["whole"])
    assert all(words.startswith("w3 w21 w28 w5") for _, _, words in hypotheses(said["generate after"]))
    hub = FlowformerLanguageModel.from_pretrained(str(tmp_path), "checkpoint_best.pt", data_bin).eval()
    assert isinstance(hub.task, PromptedLanguageModelingTask)
    assert hub.sample("w3 w21", beam=2, max_len_b=6).startswith("w3 w21")
    read_prompt(hub, "w3 w21 w28 w5\n", replace_newline_with_eos=True).save(tmp_path / "line.safetensors")
    assert len(PromptState.load(tmp_path / "line.safetensors", hub.models, hub.task.dictionary)) == 5
    for text, word in (("", "no tokens"), ("w5 <pad> w6", "<pad>")):
        with refused_in_one_line(tmp_path, word):
            read_prompt(hub, text)
    state = PromptState.load(Path(kept), hub.models, hub.task.dictionary)
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


# ---- fairseq-hydra-train with a YAML file and overrides

#: Options of a model in fairseq's nested form, and of a criterion of ours.
GROUPS: dict[str, dict[str, Any]] = {
    "common": {"user_dir": USER_DIR, "cpu": True},
    "task": {"_name": "language_modeling", "tokens_per_sample": 48},
    "model": {"_name": "daft_conv_lm", "daft_window": 9, "decoder": {"embed_dim": 16, "ffn_embed_dim": 24}},
    "criterion": {"_name": "sparse_cross_entropy", "entropy_weight": 0.01},
    "optimizer": {"_name": "adam"},
    "lr_scheduler": {"_name": "fixed"},
    "dataset": {"max_tokens": 384, "num_workers": 0, "disable_validation": True},
    "optimization": {"max_update": 2, "lr": [0.003]},
}


def test_a_nested_file_and_overrides(data_bin: str, tmp_path: Path) -> None:
    """They build the sizes that they name; the checkpoint has them, validates, and loads with overrides of its own.

    It also loads in Python, although hydra's logging, with the path of a file, is stored in it. A key that nothing
    reads ends a training.
    """
    file = str(tmp_path / "out" / "checkpoint_last.pt")
    places = {"checkpoint": {"save_dir": str(tmp_path / "out")}, "hydra": {"run": {"dir": str(tmp_path / "run")}}}
    config = {**GROUPS, **places, "task": {**GROUPS["task"], "data": data_bin}}
    (tmp_path / "tiny.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    command = ["--config-dir", str(tmp_path), "--config-name", "tiny"]
    (said,) = Forked(Command("fairseq_cli.hydra_train", [*command, "+model.decoder_layerz=3"])).printed()
    assert "model.decoder_layerz is 3, which daft_conv_lm does not read; allowed: model.decoder_layers" in said
    assert not list(tmp_path.glob("out/*.pt"))
    overrides = "model.decoder.embed_dim=32 +model.decoder.attention_heads=4 +model.decoder.layers=2".split()
    overrides += ["+model.daft_gumbel_temperature=0.25", "+model.decoder_learned_pos=true"]
    read = [data_bin, "--user-dir", USER_DIR, "--task", "language_modeling", "--cpu", "--path", file, "--fp16"]
    validate = ("fairseq_cli.validate", [*read, "--max-tokens", "384", "--log-format", "json"], "")
    _, output = run_in_turn(("fairseq_cli.hydra_train", [*command, *overrides], ""), validate)
    (validated,) = entries(output, "valid")
    (model,), stored, _ = load_model_ensemble_and_task([file], arg_overrides={"decoder_layerdrop": 0.25})
    assert len(model.decoder.layers) == 2 and model.decoder.embed_tokens.embedding_dim == 32
    assert stored.model.decoder_embed_dim == 32 and stored.model.decoder_learned_pos
    assert stored.criterion.entropy_weight == 0.01 and model.decoder.decoder_layerdrop == 0.25
    inner = model.decoder.layers[1].self_attn.inner
    assert (inner.options.window, inner.options.gumbel_temperature) == (9, 0.25)
    assert inner.gamma.abs().max() > 0.0, "it was trained"
    assert validated["valid_position_entropy"] == pytest.approx(position_entropy(model).item(), rel=1e-3)
    hub = LinearTimeLanguageModel.from_pretrained(str(tmp_path / "out"), "checkpoint_last.pt", data_bin)
    assert hub.sample("w3 w21", max_len_b=5).startswith("w3 w21")
    state = torch.load(file)
    state["cfg"]["model"].update(decoder={"embed_dim": 80}, decoder_layerz=3)  # as earlier versions stored it
    torch.save(state, file)
    assert load_model_ensemble_and_task([file])[0][0].decoder.embed_tokens.embedding_dim == 32
