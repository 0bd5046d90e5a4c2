"""The whole comparison from catalogues to the table; its scores."""

import dataclasses
import json

import pytest
import sacrebleu
import sentencepiece

from recipes.shared import encoder_decoders
from recipes.shared.subword_text import train_sentencepiece
from recipes.shared.working_folder import working_folder
from recipes.translation import compare
from recipes.translation.catalogues import BYTES
from recipes.translation.compare import DEFAULT_MODELS, Translation
from tests.recipes.translation.catalogue_files import write_programs

#: Messages; sentencepiece normalises "½", and "ķ" is no subword, but two bytes.
TARGETS = ["die ½ Platte wird jetzt voll", "Datei kann nicht geöffnet werden", "Ķekava und Ropaži wird jetzt Datei"]
HYPOTHESES = ["die Platte wird jetzt voll", "Datei kann nicht gelesen werden", TARGETS[2]]
END = "2026-11-22 | INFO | fairseq_cli.generate | Translated 3 sentences (20 tokens) in 0.75s (4.00 sentences/s)"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the text of the test part and a model of subwords; the model."""
    folder = tmp_path_factory.mktemp("scores")
    subwords = compare.prepare.subwords_path(folder)
    train_sentencepiece([TARGETS[1], HYPOTHESES[0], HYPOTHESES[1]] * 9, subwords, 285, masked=False, threads=1)
    text = compare.prepare.text_path(folder, "test", "de")
    text.parent.mkdir()
    text.write_text("".join(f"{target}\n" for target in TARGETS), encoding="utf-8")
    return folder, sentencepiece.SentencePieceProcessor(model_file=str(subwords))


def test_texts_are_scored(model):
    """In the order of the messages, and without bytes of characters or sentencepiece's spelling of the reference."""
    folder, subwords = model
    log = []
    for number in (2, 0, 1):
        target, hypothesis = (" ".join(subwords.encode(x[number], out_type=str)) for x in (TARGETS, HYPOTHESES))
        log += [f"T-{number}\t{target}", f"H-{number}\t-0.5\t{hypothesis}", f"D-{number}\t-0.5\t{hypothesis}"]
    assert "<0x" in log[1]
    metrics = (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf)
    options = Translation(out=folder)
    assert options.count([*log, END]) == (*(score(HYPOTHESES, [TARGETS]).score for score in metrics), 250.0)
    assert not {"--post-process", "--scoring"} & {*options.generate_arguments()}
    for short, said in ((log, "no end"), ([*log[:6], END], "has 2 messages; allowed: all 3")):
        with pytest.raises(ValueError, match=said):
            options.count(short)


@pytest.mark.parametrize("character", ["ķ", "k", "漢", "½"])
def test_no_message_has_more_subwords_than_fairseq_allows(model, character):
    """Even if every byte is one; "½" has five when it is normalised."""
    size = {"½": 5}.get(character, len(character.encode()))
    assert len(model[1].encode(character * (BYTES // size))) + 1 <= 1_024


def test_flowformer_has_every_cross_attention_by_default():
    assert DEFAULT_MODELS[0] == "transformer"
    assert {name.partition("/")[2] for name in DEFAULT_MODELS[1:]} == {*encoder_decoders.CROSS_ATTENTIONS}


@pytest.fixture(scope="module")
def compared(tmp_path_factory, imported_already):
    """A whole comparison of two tiny models: training, generation, and time by the length of the source."""
    folder = tmp_path_factory.mktemp("compare")
    write_programs(folder)
    arguments = ["--folder", str(folder), "--out", str(folder / "out"), "--quick", "--seeds", "1", "--subwords", "400"]
    arguments += ["--models", "transformer", "flow/linear", "--width", "8", "--heads", "2", "--layers", "1"]
    arguments += ["--updates", "2", "--lengths", "8", "1100"]
    assert compare.main(arguments) == 0
    return folder / "out", arguments


def test_from_catalogues_to_the_table(compared, capsys, monkeypatch):
    """A second call runs nothing; another learning rate in the same folder is refused, and too small a batch."""
    out, arguments = compared
    content = json.loads((out / "results.json").read_text())
    assert [result["model"] for result in content["results"]] == ["transformer", "flow/linear"]
    assert all(0 <= result[score] <= 100 for result in content["results"] for score in ("bleu", "chrf", "next"))
    # A source can be longer than what the models were trained for.
    assert {(speed["model"], speed["length"]) for speed in content["speeds"]} == {
        (name, length) for name in ("transformer", "flow/linear") for length in (8, 1100)
    }
    assert all(speed["faster"] == 1.0 for speed in content["speeds"] if speed["model"] == "transformer")
    assert (out / "results.png").exists() and sum(pairs for pairs, _ in content["parts"].values()) == 24 * 12
    monkeypatch.setattr(encoder_decoders, "run", None)
    monkeypatch.setattr(compare, "measure", None)
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--lr", "0.5"]) == 1
    assert "lr is 0.5; allowed in" in capsys.readouterr().err
    with (
        working_folder(out, compare.EXPERIMENT.command),
        pytest.raises(ValueError, match="--batch-tokens is 9; allowed"),
    ):
        compare.data(dataclasses.replace(compare.EXPERIMENT.parse(arguments), batch_tokens=9))
