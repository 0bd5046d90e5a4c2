"""Leaks: ours are 0, those of public packages and of a toy are detected, and the README has the numbers."""

import re
from pathlib import Path

import pytest
import torch

from recipes.padding import __main__ as command
from recipes.padding.measure import Changes, measure
from recipes.padding.ours import OPTIONS, forms, ours
from recipes.padding.peers import PEERS, Missing, Peer

ROOT = Path(__file__).parents[3]


def zeros(changes: Changes) -> list[bool]:
    return [cell == "0" for cell in command.cells(changes) if cell != "-"]


@pytest.mark.parametrize("name, causal", [(name, causal) for name in OPTIONS for causal in forms(name)])
def test_nothing_reaches_a_real_token_here(name, causal):
    changes = measure(ours(name), causal)
    assert all(zeros(changes)) and (changes.later is not None) == causal


def test_each_leak_of_a_toy_is_found():
    def padded_mean(x, padding, causal):
        return x + x.mean(1, keepdim=True)

    def batch_mean(x, padding, causal):
        return x + (0.0 if padding is None else x[:, :64].mean((0, 1)))

    def counted(x, padding, causal):
        positions = torch.arange(x.shape[1])[:, None] / 100.0
        return x + positions

    assert zeros(measure(padded_mean, True)) == [False, False, False, False, True]
    assert zeros(measure(batch_mean, False)) == [True, False, False, False]
    assert zeros(measure(counted, False)) == [True, True, False, True]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.mechanism}-{peer.package}-{PEERS.index(peer)}")
def test_what_a_public_package_leaks_is_found(peer):
    try:
        attend = peer.load()
    except Missing as error:
        pytest.skip(f"{peer.package}: {error}")
    exact = peer.mechanism == "longformer" or "exact" in peer.note
    for causal in peer.forms:
        assert all(zeros(measure(attend, causal))) == exact


def test_a_package_that_is_not_there_or_fails_is_a_row_that_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('needs another torch\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    peers = [
        Peer("local", name, module, None) for name, module in (("none", "no_package.x"), ("bad", "broken_package"))
    ]
    monkeypatch.setattr(command, "PEERS", peers)
    monkeypatch.setattr(command, "OPTIONS", ["local"])
    assert command.main(["--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "results.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    assert [(row[1], row[2], row[-1]) for row in rows[2:]] == [
        ("none", "-", "not installed"),
        ("bad", "-", "import fails: needs another torch"),
    ]
    assert [row[2:5] for row in rows[:2]] == [["no", "0", "0"], ["yes", "0", "0"]]
    assert "lineartime" in capsys.readouterr().out


def test_the_reference_says_how_much_padding_changes_in_packages():
    """MECHANISMS.md has the largest leak over all packages, and the number of affected mechanisms."""
    table = (ROOT / "recipes" / "padding" / "README.md").read_text().splitlines()
    largest: dict[tuple[str, str], float] = {}
    for cells in (line.strip("| ").split("|") for line in table if line.startswith("| `")):
        key = cells[0].strip(" `"), cells[1].split()[0]
        values = [float(cell) for cell in cells[3:6] if cell.strip() != "-"]
        largest[key] = max([largest.get(key, 0.0), *values])
    measured = {key: value for key, value in largest.items() if key[1] != "lineartime"}
    assert len(measured) == len({(peer.mechanism, peer.package) for peer in PEERS})
    text = (ROOT / "common" / "MECHANISMS.md").read_text()
    (count,) = re.findall(r"public packages of (\w+) of these mechanisms it does, by\s+up to ([\d.]+) of", text)
    assert count == ("eight", f"{max(measured.values())}")
    assert len({mechanism for (mechanism, _), value in measured.items() if value}) == 8
