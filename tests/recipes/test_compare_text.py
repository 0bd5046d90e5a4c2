"""Language models on any text: the same budget for every name, and the comparison from the text to the table."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq import options as fairseq_options
from fairseq.utils import import_user_module

from common.attention import ATTENTIONS
from common.modules.forget_gate import ForgetGate
from recipes import compare_text, models

SIZES = "--updates 4 --width 16 --heads 2 --layers 1 --tokens-per-sample 16 --batch-tokens 64".split()
OPTIONS = models.parser("", "work").parse_args(SIZES)


def build(name: str):
    """The model that fairseq-train builds."""
    return models.build(models.model_arguments(OPTIONS, name), models.dictionary_of(20))


def test_every_model_is_accepted_and_has_the_same_budget(monkeypatch) -> None:
    """Options differ only in those of the attention; windows and chunks are a quarter of a sequence."""
    monkeypatch.chdir(Path(compare_text.__file__).parents[1])
    import_user_module(Namespace(user_dir="recipes/wikitext103/gate_variants"))
    budgets, reaches = set(), {}
    for name in models.all_names():
        words = [str(word) for word in models.command(OPTIONS, Path("data"), models.model_arguments(OPTIONS, name), 1)]
        parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [*words[2:], "--cpu"])
        assert ("no-token-positional" in " ".join(words)) == name.endswith(models.NO_POSITIONS)
        assert ("-short-conv 4" in " ".join(words)) == ("+short_conv" in name)
        for part in ("competition", "allocation"):
            assert (f"--flow-{part} none" in " ".join(words)) == (f"+no_{part}" in name)
        budgets.add((tuple(parsed.lr), parsed.max_update, parsed.clip_norm, parsed.max_tokens, parsed.decoder_layers))
        sizes = {x: size for x, size in vars(parsed).items() if x.endswith(("_window", "_chunk_size"))}
        reaches[name] = [size for size in sizes.values() if size is not None]
    assert budgets == {((0.003,), 4, 1.0, 64, 1)}
    assert [reaches[name] for name in ("local", "mixed_chunk", "softmax")] == [[4], [4], []]
    causal = [name for name, attention in ATTENTIONS.items() if "causal" in attention.supports]
    assert models.names()[: len(causal)] == causal and "softmax+short_conv" not in models.names()
    assert {*models.default_names(), *compare_text.GATES} <= {*models.all_names()}


@pytest.mark.parametrize(
    ("name", "weight", "bias"),
    [("linear+fixed", False, False), ("flow+learned", False, True), ("linear+forget", True, True)],
)
def test_what_of_a_gate_is_trained(name, weight, bias, monkeypatch) -> None:
    monkeypatch.chdir(Path(compare_text.__file__).parents[1])
    import_user_module(Namespace(user_dir="recipes/wikitext103/gate_variants"))
    model = build(name)
    [gate] = [module for module in model.modules() if isinstance(module, ForgetGate)]
    assert not gate.gate_proj.weight.any()
    trained = {name: parameter.requires_grad for name, parameter in gate.named_parameters()}
    assert trained == {"gate_proj.weight": weight, "gate_proj.bias": bias}
    assert model.decoder.embed_positions is not None
    assert build(name + models.NO_POSITIONS).decoder.embed_positions is None


def test_from_a_text_to_the_table(tmp_path, imported_already, capsys) -> None:
    """The results are those of the logs; what is complete is not trained again, and another text is refused."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("to be or not to be\n" * 60)
    arguments = ["--file", str(text), "--quick", "--out", str(out), "--seeds", "1", *SIZES]
    arguments += ["--models", "softmax", "linear+fixed"]
    compare_text.main(arguments)
    printed = capsys.readouterr().out
    softmax, linear = json.loads((out / "results.json").read_text())
    log = (out / "runs" / "softmax.1" / "train.log").read_text()
    best = min(softmax["curve"], key=lambda point: point[1])
    assert len(softmax["curve"]) == 4 and softmax["update"] == best[0]
    assert f'"test_ppl": "{softmax["perplexity"]:g}"' in log and f'"valid_ppl": "{best[1]:g}"' in log
    assert f"{softmax['perplexity']:.2f}" in printed and "stay as they are at first" in printed
    assert linear["parameters"] > 0 and (out / "results.png").stat().st_size > 10_000
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.log")}
    compare_text.main([*arguments, "flow+short_conv"])
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.log") if path in times} == times
    assert len(json.loads((out / "results.json").read_text())) == 3
    for change in (["--words"], ["--lr", "0.5"]):
        with pytest.raises(SystemExit, match="(?i)choose another --out"):
            compare_text.main([*arguments, *change])


@pytest.mark.parametrize("wrong", [["--models", "gpt"], ["--models", "softmax+nothing"], ["--tokens-per-sample", "65"]])
def test_what_is_refused(wrong, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        compare_text.main(["--file", __file__, "--out", str(tmp_path / "out"), "--batch-tokens", "64", *wrong])
    assert wrong[1] in capsys.readouterr().err and not (tmp_path / "out").exists()
