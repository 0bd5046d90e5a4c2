"""The comparison of conversions: its forms, its budget, the share that is won back, and once all of it."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from fairseq import options
from torch import nn

from common.attention import build_attention
from recipes.from_softmax import compare, images, parts
from recipes.from_softmax.forms import DEFAULT, PLAIN, Windows, form
from recipes.from_softmax.needles import distances
from recipes.from_softmax.results import with_shares, won_back
from recipes.from_softmax.stages import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED

ARGUMENTS = (
    "--file text.txt --models hedgehog lolcats*3,softmax --seeds 2 --updates 100 --width 8 --layers 4 --heads 2 "
    "--batch-tokens 64 --tokens-per-sample 16 --window 4 --transfer-share 0.25 --temperature 2 --weight 0.75"
).split()
OPTIONS = compare.EXPERIMENT.parse(ARGUMENTS)


def test_forms_are_patterns_of_known_names() -> None:
    plain, mixed = form("lolcats_relu", 4, Windows(8)), form("hedgehog*3,softmax", 4, Windows(8))
    assert plain.pattern == "lolcats" and plain.kinds == ["lolcats"] * 4 and plain.windowed
    assert plain.options == {"lolcats": {"feature_map": "relu", "window": 8, "window_weight": 0.1}}
    assert form("lolcats", 4, Windows(8, 0.5)).options["lolcats"]["window_weight"] == 0.5
    longformer = form("longformer*3,softmax", 4, Windows(8, sinks=2))
    assert longformer.options == {"longformer": {"window": 8, "global_tokens": 2}} and not longformer.windowed
    assert form("local", 4, Windows(8)).arguments() == ["--lineartime-layers", "local", "--local-window", 8]
    assert mixed.kinds == ["hedgehog"] * 3 + ["softmax"] and mixed.softmax_layers == [3] and not mixed.windowed
    assert mixed.learns_maps and not form("t2r,flow", 4, Windows(8)).learns_maps
    assert len(DEFAULT) == 2 * len(PLAIN) and not form("flow", 4, Windows(8)).learns_maps


@pytest.mark.parametrize("name", ["flo", "softmax", "flow*0", "lolcats,lolcats_relu", "flow*4,softmax"])
def test_a_form_that_is_none_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"--models.*; allowed:"):
        form(name, 4, Windows(8))


@pytest.mark.parametrize("weight", [0.0, 1.0, -0.5])
def test_a_window_weighs_between_0_and_1(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"--window-weight is {weight}; allowed: a number above 0 and below 1"):
        form("lolcats", 4, Windows(8, weight))
    assert form("linear", 4, Windows(8, weight)).options == {}


def test_attentions_that_learn_maps_are_those_with_parameters() -> None:
    for name in PLAIN:
        kind = form(name, 1, Windows(4)).kinds[0]
        module = build_attention(kind, causal=True, num_heads=2, head_dim=4, max_tokens=16)
        assert form(name, 1, Windows(4)).learns_maps == bool(list(module.parameters())), name


def test_stages_share_a_fifth_of_the_updates() -> None:
    assert OPTIONS.lasts(OPTIONS.updates) == {TEACHER: 100, TRANSFERRED: 5, DISTILLED: 15, SCRATCH: 20}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"share": 1.0}, "--share is 1"),
        ({"transfer_share": 0.0}, "--transfer-share is 0"),
        ({"updates": 4}, "--updates is 4"),
        ({"layers": 2}, "--models is .lolcats"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*allowed"):
        dataclasses.replace(OPTIONS, **change).completed()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--temperature", ("-1", "0", "inf", "nan")),
        ("--weight", ("-0.1", "5", "nan")),
        ("--window-dropout", ("-0.1", "7", "nan")),
    ],
)
def test_a_number_that_a_stage_cannot_have_is_refused_at_once(option: str, values: tuple[str, ...], capsys) -> None:
    for experiment, needed in ((compare.EXPERIMENT, ["--file", "text.txt"]), (images.EXPERIMENT, [])):
        for value in values if option in experiment.parser().format_help() else ():
            with pytest.raises(SystemExit):
                experiment.parse([*needed, option, value])
            assert re.search(f"{option}: {value}.*; allowed: ", capsys.readouterr().err)


def words_of(stage: str, name: str) -> list[str]:
    """The arguments of a training, as fairseq's parser takes them."""
    planned = OPTIONS.planned(stage, name, 2, Path("data-bin"), Path("runs"))
    words = [str(word) for word in planned.training.arguments]
    options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"])
    return words


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_trainings_of_a_form_differ_in_start_teacher_criterion_budget_and_rate() -> None:
    """A stage goes on from the one before it; all read the same teacher."""
    name = "lolcats*3,softmax"
    teacher, first, second, scratch = (
        words_of(stage, of)
        for stage, of in ((TEACHER, TEACHER), *((x, name) for x in (TRANSFERRED, DISTILLED, SCRATCH)))
    )
    assert [value(words, "--max-update") for words in (teacher, first, second, scratch)] == ["100", "5", "15", "20"]
    assert [value(words, "--lr") for words in (teacher, first, second, scratch)] == ["0.003", "0.01", "0.001", "0.003"]
    assert value(teacher, "--arch") == "transformer_lm" and "--decoder-normalize-before" in teacher
    for words in (first, second, scratch):
        assert value(words, "--lineartime-layers") == name and value(words, "--lolcats-window") == "4"
    for words in (first, second):
        assert value(words, "--teacher") == "runs/teacher.2/checkpoints/checkpoint_last.pt"
    assert value(first, "--finetune-from-model") == "runs/lolcats-3-softmax.exchanged.2.pt"
    assert value(second, "--finetune-from-model") == "runs/lolcats-3-softmax.transfer.2/checkpoints/checkpoint_last.pt"
    assert value(first, "--criterion") == "attention_transfer" and value(second, "--criterion") == "distillation"
    assert value(second, "--distillation-temperature") == "2.0" and value(second, "--distillation-weight") == "0.75"
    assert "--teacher" not in scratch and "--finetune-from-model" not in scratch and "--criterion" not in scratch


def test_stage_1_teaches_maps_or_else_projections() -> None:
    for name in DEFAULT:
        words = words_of(TRANSFERRED, name)
        learning = value(words, "--lineartime-trained-parameters")
        assert ("--transfer-window-dropout" in words) == name.startswith("lolcats")
        assert learning == ("new" if name.startswith(("t2r", "hedgehog", "lolcats")) else "attention")


def test_share_that_is_won_back() -> None:
    """0 for the exchanged model, 1 for the teacher, negative for a worse one; of logarithms."""
    assert won_back(4.0, 4.0, 2.0) == 0.0 and won_back(4.0, 2.0, 2.0) == 1.0 and won_back(4.0, 5.0, 2.0) == -0.5
    assert won_back(2.0, 2.0, 2.0) is None and won_back(1.0, 2.0, 3.0) is None
    stages = (EXCHANGED, TRANSFERRED, DISTILLED, SCRATCH)
    losses = {stage: {"test": math.log(perplexity)} for stage, perplexity in zip(stages, (16.0, 8.0, 4.0, 32.0))}
    shares = with_shares({"teacher": {"test": math.log(4.0)}, "losses": losses})["won_back"]
    assert [shares[stage]["test"] for stage in stages] == pytest.approx([0.0, 0.5, 1.0, -0.5])
    alone = with_shares({"teacher": {"test": 1.0}, "losses": {DISTILLED: {"test": 1.0}}})
    assert alone["won_back"] == {DISTILLED: {"test": None}}


def test_parts_of_an_attention_with_a_window() -> None:
    """Each part is what it is called; afterwards the model is as it was."""
    torch.manual_seed(0)
    attention = build_attention("lolcats", causal=True, num_heads=2, head_dim=4, window=3)
    model = nn.ModuleList([attention])
    q, k, v = (torch.randn(2, 2, 9, 4) for _ in range(3))
    found = {}
    for part in parts.PARTS:
        with parts.attending(model, part):
            found[part] = attention(q, k, v)
    assert torch.equal(found[parts.WHOLE], attention(q, k, v))
    assert not found[parts.NOTHING].any()
    later = k.clone()
    later[:, :, 0] += 1.0
    with parts.attending(model, parts.WINDOW):
        assert torch.equal(attention(q, later, v)[:, :, 3:], found[parts.WINDOW][:, :, 3:])
    with parts.attending(model, parts.LINEAR):
        assert not torch.equal(attention(q, later, v)[:, :, 3:], found[parts.LINEAR][:, :, 3:])
    assert not torch.allclose(found[parts.LINEAR], found[parts.WHOLE])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Two hundred short lines."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text\n" for i in range(200)), encoding="utf-8")
    return path


def test_from_a_text_to_the_results(text: Path, tmp_path: Path, imported_already: None, monkeypatch) -> None:
    """A form with maps and a window, from its teacher on; a second time nothing is trained or measured."""
    out = tmp_path / "out"
    arguments = ["--file", str(text), "--quick", "--out", str(out), "--models", "lolcats,softmax", "--seeds", "1"]
    arguments += (
        "--width 8 --heads 2 --layers 2 --tokens-per-sample 16 --batch-tokens 64 --window 4 --needles 2".split()
    )
    assert compare.main(arguments) == 0
    content = json.loads((out / "results.json").read_text())
    teacher, one = content["results"]
    assert {*one["losses"]} == {EXCHANGED, TRANSFERRED, DISTILLED, SCRATCH} and {*one["parts"]} == {*parts.PARTS}
    assert one["teacher"] == teacher["losses"] and one["parameters"] > teacher["parameters"]
    # In one layer of two: maps of queries and keys of 2 rows and 4 channels, and a gate, of 2 heads.
    assert one["learned"] == 2 * (2 * 2 * 4 + 1)
    assert one["parts"]["whole"] == pytest.approx(one["losses"][DISTILLED])
    assert one["won_back"][EXCHANGED]["test"] in (0.0, None)
    reach = {**teacher["reach"], **one["reach"]}
    assert {*reach} == {TEACHER, EXCHANGED, DISTILLED} and content["distances"] == distances(16)
    for measured in reach.values():
        assert len(measured["found"]) == len(content["distances"]) and measured["bins"][-1]["end"] == 32
    for name in ("losses", "changed_parameters", "losses_of_parts", "measure", "convert"):
        monkeypatch.setattr(compare, name, None if name != "changed_parameters" else lambda *_: one["learned"])
    assert compare.main(arguments) == 0
    assert json.loads((out / "results.json").read_text())["results"] == [teacher, one]
    assert compare.main([*arguments, "--window", "8"]) == 1


def test_what_is_wrong_is_said(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Before anything is trained."""
    out = tmp_path / "out"
    cases = (("--share 2", "--share is 2"), ("--layers 2", "flow*3,softmax"), ("--updates 3", "is 3"))
    for wrong, said in (*cases, ("--needles 1", "--needles is 1; allowed: 2 to")):
        assert compare.main(["--file", str(text), "--out", str(out), *wrong.split()]) == 1
        assert said in capsys.readouterr().err
    assert not out.exists()
