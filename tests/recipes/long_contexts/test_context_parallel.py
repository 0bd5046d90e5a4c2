"""The bytes that processes of one sequence send, counted by a command."""

import re
from functools import partial

import torch.multiprocessing as mp

from recipes.long_contexts import context_parallel
from tests.processes import fork_server


def test_bytes_do_not_grow_with_the_tokens_and_memory_is_shared(capsys, monkeypatch):
    """Processes are forked from one that has imported torch."""
    fork_server()
    monkeypatch.setattr(mp, "spawn", partial(mp.start_processes, start_method="forkserver"))
    context_parallel.main("--processes 1 2 --tokens 300 1200 --layers local".split())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| layer | processes | n = 300 | n = 1,200 |"
    (_, few_alone), (_, many_alone) = _cells(lines[2])
    (sent_of_few, _), (sent_of_many, many) = _cells(lines[3])
    assert sent_of_few == sent_of_many > 0
    assert few_alone < many < 0.8 * many_alone


def _cells(line: str) -> list[tuple[int, float]]:
    """Bytes and MiB of each number of tokens."""
    found = re.findall(r"([\d,]+) \(([\d.,]+) MiB\)", line)
    return [(int(sent.replace(",", "")), float(peak.replace(",", ""))) for sent, peak in found]


def test_no_tokens_are_refused(capsys):
    assert context_parallel.main(["--tokens", "0"]) == 1
    assert "--tokens is 0; allowed: at least 1" in capsys.readouterr().err
