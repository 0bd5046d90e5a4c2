"""Reading fairseq's logs: lines as fairseq 0.12.3.1 wrote them."""

import math

import pytest

from recipes.shared import fairseq_log
from recipes.shared.fairseq_log import Evaluation

TRAIN = (
    '2026-11-20 19:59:33 | INFO | train_inner | {"epoch": 1, "update": 0.279, "loss": "7.718", "ppl": "210.56", '
    '"wps": "%s", "ups": "1.3", "wpb": "2048", "bsz": "1", "num_updates": "%d", "lr": "0.00257813", "gnorm": "1.56", '
    '"clip": "100", "train_wall": "4", "wall": "46"}\n'
)
VALID = (
    '2026-11-20 19:59:35 | INFO | valid | {"epoch": 1, "valid_loss": "7.611", "valid_ppl": "195.5", "valid_wps": '
    '"8123.1", "valid_wpb": "1998.5", "valid_bsz": "1", "valid_num_updates": "50"}\n'
)
EPOCH = '2026-11-20 20:01:25 | INFO | train | {"epoch": 1, "train_loss": "7.819", "train_num_updates": "160"}\n'
NOISE = "2026-11-20 19:58:41 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)\n"
EVALUATION = [
    "2026-11-20 20:01:52 | INFO | fairseq_cli.eval_lm | Evaluated 38,557 tokens in 12.3s (3131.42 tokens/s)\n",
    "2026-11-20 20:01:52 | INFO | fairseq_cli.eval_lm | Loss (base 2): 7.0518, Perplexity: 132.68\n",
]


def test_parse_training():
    lines = [NOISE, TRAIN % ("2660.9", 50), VALID, TRAIN % ("900.5", 55), EPOCH]
    points = fairseq_log.parse_training(lines)
    assert [point[:3] for point in points] == [("train_inner", 1, 50), ("valid", 1, 50), ("train_inner", 1, 55)]
    assert [point.values["loss"] for point in points] == [7.718, 7.611, 7.718]
    assert [point.values["wall"] for point in points] == [46.0, 46.0, 46.0]
    assert [points[0].values["wps"], points[1].values["ppl"], points[2].values["wps"]] == [2660.9, 195.5, 900.5]


def test_median_speed_leaves_out_the_first_and_what_holds_a_validation():
    speeds = ("1.0", 5), ("3000.0", 10), ("3200.0", 15), ("3100.0", 20)
    lines = [TRAIN % speed for speed in speeds] + [VALID, TRAIN % ("10.0", 55)]
    assert fairseq_log.median_tokens_per_second(fairseq_log.parse_training(lines)) == 3100.0


def test_median_speed_needs_two_points():
    points = fairseq_log.parse_training([TRAIN % ("1.0", 5), VALID])
    with pytest.raises(ValueError, match="2 points; allowed: "):
        fairseq_log.median_tokens_per_second(points)


def test_parse_parameters():
    line = "2026 | INFO | fairseq_cli.train | num. shared model params: 4,680,448 (num. trained: 4,680,448)"
    assert fairseq_log.parse_parameters([NOISE, line]) == 4_680_448


def test_parse_evaluation():
    assert fairseq_log.parse_evaluation(EVALUATION) == Evaluation(38_557, 7.0518, 132.68)


def test_missing_evaluation_is_an_error():
    with pytest.raises(ValueError, match="no number of tokens evaluated"):
        fairseq_log.parse_evaluation([NOISE])


def test_parse_samples():
    lines = ["S-0\t▁for", "H-0\t-3.1\tfor ▁x ⏎", "D-0\t-3.1\tfor x⏎  y\n", "P-0\t-1.0"]
    assert fairseq_log.parse_samples(lines) == ["for x⏎  y"]


def test_bits_per_byte_is_all_bits_over_all_bytes():
    # A uniform model of 256 one-byte tokens needs 8 bits per byte.
    assert fairseq_log.bits_per_byte(Evaluation(1000, math.log2(256), 256.0), 1000) == pytest.approx(8.0)
    # Tokens of four bytes need a quarter. The ends of 8 documents add bits but no bytes.
    assert fairseq_log.bits_per_byte(Evaluation(250 + 8, 8.0, 256.0), 1000) == pytest.approx(258 * 8 / 1000)


def test_bits_per_byte_of_no_text():
    with pytest.raises(ValueError, match="text_bytes is 0; allowed: at least 1"):
        fairseq_log.bits_per_byte(Evaluation(1, 1.0, 2.0), 0)


def test_validation_of_a_split():
    line = '2026-11-22 07:00:00 | INFO | test | {"test_loss": "0.25", "test_accuracy": "98.9"}\n'
    assert fairseq_log.parse_validation([NOISE, line], "test") == {"loss": 0.25, "accuracy": 98.9}
    with pytest.raises(ValueError, match="no results of valid"):
        fairseq_log.parse_validation([NOISE, line], "valid")
