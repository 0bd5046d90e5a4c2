"""The command that times Triton kernels: its refusal without a GPU, and the lines of its table."""

import torch

from recipes.bench.kernels import times


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert times.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_line_for_each_mechanism_batch_and_length(monkeypatch):
    monkeypatch.setattr(times, "row", lambda mechanism, dtype, sizes: [mechanism, dtype, *map(str, sizes)])
    options = times.parser().parse_args(["--batch", "1", "3", "--tokens", "128", "--dtype", "float16"])
    assert times.table(options).rows == [
        [mechanism, "float16", batch, "128"] for mechanism in ("flow", "mixed_chunk") for batch in ("1", "3")
    ]
