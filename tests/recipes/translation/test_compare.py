"""The whole comparison from catalogues to the table; its scores."""

import json

import pytest
import sacrebleu

from recipes.shared import encoder_decoders
from recipes.translation import compare
from recipes.translation.compare import DEFAULT_MODELS, Translation
from tests.recipes.translation.catalogue_files import write_programs

LOG = """\
S-1\tcannot open the file
T-1\tDatei kann nicht geöffnet werden
H-1\t-0.5\tDatei kann nicht gelesen werden
D-1\t-0.5\tDatei kann nicht gelesen werden
S-0\tthe disk is full now
T-0\tdie Platte wird jetzt voll
H-0\t-0.5\tdie Platte wird jetzt voll
D-0\t-0.5\tdie Platte wird jetzt voll
2026-11-22 10:00:00 | INFO | fairseq_cli.generate | Translated 2 sentences (20 tokens) in 0.5s (4.00 sentences/s)
Generate test with beam=4: BLEU = 57.89 90.0/75.0 (BP = 1.000 ratio = 1.000 hyp_len = 10 ref_len = 10)
"""


def test_scores_are_read_from_a_log():
    """BLEU as fairseq-generate prints it, chrF of the words, the time of a message."""
    scores = Translation().count(LOG.splitlines())
    targets = ["Datei kann nicht geöffnet werden", "die Platte wird jetzt voll"]
    hypotheses = ["Datei kann nicht gelesen werden", targets[1]]
    assert scores == (57.89, sacrebleu.corpus_chrf(hypotheses, [targets]).score, 250.0)
    for kept in (-1, 4):
        with pytest.raises(ValueError, match="allowed"):
            Translation().count(LOG.splitlines()[:kept])


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
    """A second call runs nothing; another learning rate in the same folder is refused."""
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
