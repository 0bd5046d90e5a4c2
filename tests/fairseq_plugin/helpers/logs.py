"""The numbers in what fairseq's commands print."""

import json
import re


def entries(output: str, kind: str) -> list[dict[str, float]]:
    """The numbers of fairseq's JSON log lines: ``train`` at the ends of epochs, ``train_inner``, ``valid``."""
    lines = re.findall(rf"\| {kind} \| (\{{.*\}})", output)
    return [{key: float(value) for key, value in json.loads(line).items()} for line in lines]


def losses(output: str) -> list[float]:
    """The training loss of every update."""
    return [entry["loss"] for entry in entries(output, "train_inner")]


def perplexity(output: str) -> float:
    """What ``fairseq-eval-lm`` prints last."""
    return float(re.search(r"Perplexity: ([\d.]+)", output).group(1))
