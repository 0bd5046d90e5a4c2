"""The whole comparison from text to table; its commands, and scoring."""

import json
from pathlib import Path

import pytest
from fairseq import options

from recipes.long_copy import compare, generated
from recipes.long_copy.compare import DEFAULT_MODELS, LongCopy
from recipes.long_copy.generated import Counted
from recipes.shared import encoder_decoders
from recipes.shared.encoder_decoders import CROSS_ATTENTIONS, STOCK, attentions, reads_source_in_one_state

OPTIONS = LongCopy(source_tokens=2048, spans=2, span_tokens=3, width=64, heads=2, batch_size=4, beam=5)


def test_every_model_has_the_same_budget():
    """Commands differ only in architecture and attentions; fairseq's parser accepts them all."""
    names = [STOCK, *(f"{name}/{cross}" for name in attentions() for cross in ("softmax", "linear"))]
    names += [f"flow/{cross}" for cross in CROSS_ATTENTIONS] + [
        "flow+short_conv/linear",
        "linear+forget/linear",
        "cosformer/cosformer",
    ]
    assert set(DEFAULT_MODELS) <= set(names)
    commands = []
    for name in names:
        words = [str(word) for word in OPTIONS.train_arguments(Path("data-bin"), name, 1)]
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"])
        sizes = (parsed.encoder_layers, parsed.decoder_layers, parsed.encoder_embed_dim, parsed.decoder_ffn_embed_dim)
        assert sizes == (1, 1, 64, 128) and (parsed.max_source_positions, parsed.max_target_positions) == (2049, 7)
        if name != STOCK:
            assert parsed.lineartime_cross_attention == name.partition("/")[2]
        common = words[: words.index("--arch")] + words[words.index("--encoder-layers") :]
        commands.append(common)
    assert all(command == commands[0] for command in commands)
    conv = OPTIONS.train_arguments(Path("data-bin"), "flow+short_conv/linear", 1)
    assert conv[conv.index("--flow-short-conv") + 1] == 4


def test_a_target_is_generated_whole():
    """Two passages of three characters: six tokens, not the length of one."""
    command = OPTIONS.generate_command(Path("data-bin"), Path("best.pt"))
    assert command[command.index("--max-len-b") + 1] == "6"


def test_state_of_a_source():
    constant = [name for name in DEFAULT_MODELS if reads_source_in_one_state(name)]
    assert "flow/flow_source" in constant and "linear/linear" in constant
    assert not {STOCK, "flow/softmax", "linear/softmax"} & set(constant)


@pytest.mark.parametrize("name", ["gpt", "flow", "gpt/linear", "flow/flow", "flow+nothing/linear"])
def test_unknown_models_are_refused(name, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--file", "x", "--models", name])
    assert f"{name}; allowed: " in capsys.readouterr().err


LOG = """\
S-1\t<mark>a b <mark>c
T-1\ta b c d e f
H-1\t-0.5\ta b c d e f
D-1\t-0.5\ta b c d e f
H-1\t-0.9\tx
S-0\ta
T-0\ta b c d e f
H-0\t-1.5\tx a b d e
T-2\ta b c d e f
H-2\t-1.5\ta b c d e f g
T-3\ta b c d e f
H-3\t-1.5\t
2026-11-22 10:00:00 | INFO | fairseq_cli.generate | Translated 4 sentences (1,020 tokens) in 2.0s (2.00 sentences/s)
"""


def test_what_counts_as_right():
    """Whole targets without additions; passages and tokens by position; only the best hypothesis counts."""
    counted = generated.count(LOG.splitlines(), 3)
    assert counted == Counted(25.0, 100 * (2 + 0 + 2 + 0) / 8, 100 * (6 + 2 + 6 + 0) / 24, 500.0)
    with pytest.raises(ValueError, match="no end"):
        generated.count(LOG.splitlines()[:-1], 3)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, imported_already):
    """A whole comparison of one tiny model: training and generation.

    Sources have more than 1,024 tokens, which fairseq-generate refuses by default.
    """
    out = tmp_path_factory.mktemp("compare")
    (out / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(1500)))
    arguments = ["--file", str(out / "text.txt"), "--out", str(out / "out"), "--quick", "--seeds", "1"]
    arguments += ["--models", "flow/flow_source", "--width", "8", "--updates", "2", "--test", "5"]
    arguments += ["--source-tokens", "1100"]
    assert compare.main(arguments) == 0
    return out / "out", arguments


def test_from_the_text_to_the_table(compared, capsys, monkeypatch):
    """A second call runs nothing; another learning rate in the same folder is refused."""
    out, arguments = compared
    (result,) = json.loads((out / "results.json").read_text())["results"]
    assert result["model"] == "flow/flow_source" and [update for update, _ in result["curve"]] == [1, 2]
    # fairseq-generate prints tenths of a second; so few sources may take 0.0.
    assert 0 <= result["tokens"] < 100 and 0 <= result["milliseconds"] < 60_000
    log = (out / "runs" / "flow-flow_source.1" / "generate.log").read_text()
    assert sum(line.startswith("T-") for line in log.splitlines()) == 5  # as given, not as in --quick
    monkeypatch.setattr(encoder_decoders, "run", None)
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--lr", "0.5"]) == 1
    assert "lr is 0.5; allowed in" in capsys.readouterr().err
