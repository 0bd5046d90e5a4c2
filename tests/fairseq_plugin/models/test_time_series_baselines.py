"""The classifiers of time series without attention; their common contract is in test_time_series.py."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_plugin.data.series_folder import Description
from fairseq_plugin.models._time_series import TimeSeriesHead
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.series import CHANNELS, build_classifier, configuration, scores

SERIES = torch.randn(2, 11, CHANNELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
def literal_tcn(model: nn.Module, series: Tensor) -> Tensor:
    """Franceschi's encoder step by step for one series (T, C), with maximum pooling: (classes,)."""
    weights = dict(model.state_dict())

    def convolve(name: str, x: list[Tensor], dilation: int) -> list[Tensor]:
        direction = weights[f"{name}.parametrizations.weight.original1"]
        length = weights[f"{name}.parametrizations.weight.original0"]
        kernel = length * direction / direction.flatten(1).norm(dim=1)[:, None, None]
        out = []
        for t in range(len(x)):
            past = [t - dilation * back for back in range(kernel.shape[2])]  # the last tap is the step itself
            taps = [kernel[:, :, -1 - back] @ x[s] for back, s in enumerate(past) if s >= 0]
            out.append(F.leaky_relu(sum(taps) + weights[f"{name}.bias"]))
        return out

    x = list(series)
    for i in range(len(model.encoder.blocks)):
        block = f"encoder.blocks.{i}"
        y = convolve(f"{block}.second", convolve(f"{block}.first", x, 2**i), 2**i)
        if f"{block}.residual.weight" in weights:
            x = [weights[f"{block}.residual.weight"][:, :, 0] @ step + weights[f"{block}.residual.bias"] for step in x]
        x = [skip + branch for skip, branch in zip(x, y)]
    head = "classification_heads.toy.out_proj"
    return weights[f"{head}.weight"] @ torch.stack(x).amax(0) + weights[f"{head}.bias"]


def test_tcn_is_franceschis_encoder() -> None:
    """Causal dilated convolutions with normalised weights, residuals, the maximum over time, one linear layer."""
    model = randomised(build_classifier("tcn_time_series", encoder_layers=3, tcn_channels=5).double())
    expected = torch.stack([literal_tcn(model, steps) for steps in SERIES])
    assert_close("scores", scores(model, SERIES), expected, 1e-9)


@torch.no_grad()
def test_lstm_is_torchs_and_its_last_state_is_classified() -> None:
    model = randomised(build_classifier("lstm_time_series", encoder_layers=2).double())
    _, (states, _) = model.encoder.lstm(SERIES)
    head = model.classification_heads["toy"].out_proj
    assert_close("scores", scores(model, SERIES), head(states[-1]), 1e-9)


def test_sizes() -> None:
    """The paper's layers and width of the Transformers; Franceschi's ten blocks of 40 channels and one of 160."""
    described = Description(list("123456789"), [0.0] * 12, [1.0] * 12, 26)
    task = SimpleNamespace(description=described, max_length=26)
    lstm = 4 * (12 + 512 + 2) * 512 + 4 * (512 + 512 + 2) * 512 + 9 * 513
    first = 40 * (12 * 3 + 2) + 40 * (40 * 3 + 2) + 40 * 13  # a norm and a bias per channel, and the residual
    last = 160 * (40 * 3 + 2) + 160 * (160 * 3 + 2) + 160 * 41
    tcn = first + 9 * 2 * 40 * (40 * 3 + 2) + last + 9 * 161
    for name, expected in (("lstm_time_series", lstm), ("tcn_time_series", tcn)):
        model = tasks.FairseqTask.build_model(task, configuration(name))
        model.register_classification_head("toy", 9)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("option", ["encoder_layers", "encoder_embed_dim", "tcn_channels", "tcn_kernel_size"])
def test_sizes_that_are_none_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} is 0; allowed"):
        build_classifier("tcn_time_series", **{option: 0})


def test_pooling_of_steps_that_are_no_padding() -> None:
    """Maximum and last of the real steps; a row of only padding gives the bias."""
    features = torch.tensor([[[9.0], [-3.0], [-1.0], [-2.0], [9.0]], [[9.0], [8.0], [7.0], [6.0], [5.0]]])
    mask = torch.tensor([[True, False, False, False, True], [True] * 5])
    for pooling, expected in (("max", [-1.0, 0.0]), ("last", [-2.0, 0.0])):
        head = TimeSeriesHead(1, 1, 5, pooling, 0.0, nn.Identity())
        nn.init.ones_(head.out_proj.weight), nn.init.zeros_(head.out_proj.bias)
        assert head(features, mask).flatten().tolist() == expected
