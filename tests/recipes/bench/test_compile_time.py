"""The cost of torch.compile: measured for one product, and the command with stubbed processes."""

import json

import pytest
import torch
from torch import nn

from common.files.json_files import read
from recipes.bench.compile_time import __main__ as command
from recipes.bench.compile_time.one import Cost, compile_cost, language_model


class Product(nn.Module):
    """x @ w, for which inductor generates no C++; if ``wrong``, torch.compile multiplies by w once more."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.ones(4, 4)), wrong

    def forward(self, x):
        out = torch.mm(x, self.weight)
        return (torch.mm(out, self.weight) if self.wrong and torch.compiler.is_compiling() else out,)


def cost_of(wrong: bool) -> Cost:
    times = iter([(1.0, 2.0), (4.5, 2.25)])
    torch.compiler.reset()
    return compile_cost(Product(wrong), [torch.randn(n, 4) for n in (3, 5, 7)], lambda: next(times))


def test_the_cost_of_a_product_is_counted():
    """The cost of both passes is counted for the first length, and once more for all other lengths."""
    cost = cost_of(wrong=False)
    assert cost[:2] == (3.5, 0.25) and cost.kernels == 0 and cost.difference < 1e-6
    assert cost.graphs in (3, 4) and cost.graphs <= cost.operations <= 3 * cost.graphs


def test_what_differs_under_torch_compile_is_seen():
    assert cost_of(wrong=True).difference > 0.1


@pytest.mark.parametrize("architecture", ["flash_lm", "linear_lm"])
def test_gated_attention_units_are_as_many_as_layers_of_other_models(architecture):
    assert len(language_model(architecture).decoder.layers) == 2


def test_every_causal_mechanism_is_measured_and_no_other():
    models = command.all_models()
    assert models[0] == "transformer" and {"flash", "flow", "daft_conv", "combiner"} < set(models)
    assert not {"nystrom", "linformer", "soft"} & set(models)


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """The architectures for which processes would be started; each stub reports a cost."""
    names: list[str] = []

    def run(words, log, on_line, threads):
        names.append(words[-1])
        seconds = {"transformer_lm": 40.0, "linear_lm": 60.0, "flow_lm": 100.0}[words[-1]]
        on_line("torch said something\n")
        on_line(json.dumps(Cost(seconds, 10.0, 1234, 4, 20, 0.5 if words[-1] == "flow_lm" else 0.0)._asdict()))

    monkeypatch.setattr(command, "run", run)
    return names


def test_the_table_has_stock_and_a_second_run_goes_on(tmp_path, started, capsys):
    arguments = ["--models", "linear", "--out", str(tmp_path / "out")]
    for _ in range(2):
        assert command.main(arguments) == 0
    assert started == ["transformer_lm", "linear_lm"]
    rows = [
        line for line in (tmp_path / "out/results.md").read_text().splitlines() if "_lm` |" in line or "_lm |" in line
    ]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["transformer_lm", "50", "1.00", "40", "10", "4", "1,234", "20"],
        ["linear_lm", "70", "1.40", "60", "10", "4", "1,234", "20"],
    ]
    assert json.loads((tmp_path / "out/results.json").read_text())["linear"]["python"] == 60.0
    assert "1.40" in capsys.readouterr().out


def test_a_model_that_differs_under_torch_compile_is_an_error_after_all_others(tmp_path, started, capsys):
    assert command.main(["--models", "flow,linear", "--out", str(tmp_path / "out")]) == 1
    assert "flow_lm differs by 5.0e-01" in capsys.readouterr().err
    assert set(read(tmp_path / "out/results.json", "results")) == {"transformer", "linear"}
