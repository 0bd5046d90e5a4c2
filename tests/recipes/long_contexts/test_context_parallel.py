"""The bytes that processes of one sequence send, and rows of packed documents, measured by commands."""

import re
from functools import partial

import torch
import torch.multiprocessing as mp

from recipes.long_contexts import context_parallel, packed_documents
from tests.processes import fork_server


def test_bytes_do_not_grow_with_the_tokens_and_memory_is_shared(capsys, monkeypatch):
    """Processes are forked from one that has imported torch."""
    fork_server()
    monkeypatch.setattr(mp, "spawn", partial(mp.start_processes, start_method="forkserver"))
    context_parallel.main("--processes 1 2 --tokens 300 1200 --layers local".split())
    lines = [line for line in capsys.readouterr().out.splitlines() if "MiB" in line]
    (_, few_alone), (_, many_alone) = _cells(lines[0])
    (sent_of_few, _), (sent_of_many, many) = _cells(lines[1])
    assert sent_of_few == sent_of_many > 0
    assert few_alone < many < 0.8 * many_alone


def _cells(line: str) -> list[tuple[int, float]]:
    """Bytes and MiB of each number of tokens."""
    found = re.findall(r"([\d,]+) \(([\d.,]+) MiB\)", line)
    return [(int(sent.replace(",", "")), float(peak.replace(",", ""))) for sent, peak in found]


def test_packed_documents_are_the_documents(capsys):
    documents = packed_documents.documents_of(512)
    assert sum(map(len, documents)) == 512
    rows = [row for batch in packed_documents.padded_rows(documents, 512) for row in batch]
    assert all(torch.equal(row[: len(x)], x) and row[len(x) :].eq(1).all() for row, x in zip(rows, documents))
    packed_documents.main("--models linear --tokens 64 --row 32 --rounds 1".split())
    assert "linear_lm" in capsys.readouterr().out
