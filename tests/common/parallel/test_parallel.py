"""One sequence over several processes, compared with one process; if one fails, the others end with a message.

And torch's pipeline stages.
"""

import re
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from common.attention import build_attention
from common.modules import GatedAttentionUnit
from common.parallel import ContextGroup, check_context_parallel, own_part, part_length
from tests.common.parallel import comparisons
from tests.common.parallel.processes import Processes, in_processes
from tests.compare import assert_close
from tests.torch_versions import NEWER_THAN_2_6


def test_every_mechanism_gives_what_one_process_gives(tmp_path):
    """Every mechanism, in one start of four processes."""
    in_processes(4, tmp_path, comparisons.every_mechanism)


def test_three_processes_give_what_one_gives(tmp_path):
    """Also in torch's data parallelism, when compiled, with random draws, and sending no more for more tokens."""
    in_processes(3, tmp_path, comparisons.of_three)


def test_parts_are_the_sequence_and_padding():
    x = torch.arange(22).view(2, 11)
    for parts, multiple in ((1, 1), (2, 1), (4, 1), (3, 4), (5, 100), (20, 1)):
        length = part_length(11, parts, multiple)
        whole = torch.cat([own_part(x, i, length, -1) for i in range(parts)], dim=1)
        assert torch.equal(whole[:, :11], x) and (whole[:, 11:] == -1).all()
        assert length < multiple or length % multiple == 0


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (build_attention("softmax", causal=True), "softmax"),
        (build_attention("flow"), "not causal"),
        (GatedAttentionUnit(8, causal=True, chunk_size=None, max_positions=9), "GatedAttentionUnit"),
        (GatedAttentionUnit(8, causal=True, chunk_size=4, overlap=True), "grows"),
        (nn.Sequential(build_attention("flow", causal=True), build_attention("yoso", causal=True)), "yoso"),
        (nn.Linear(2, 2), "Linear"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_others_are_refused_by_name(model, named):
    with pytest.raises(ValueError, match=rf"{named}.*allowed.*flow, .*linear"):
        check_context_parallel(model)


def test_a_group_needs_torch_distributed():
    with pytest.raises(ValueError, match="not initialised.*allowed"):
        ContextGroup()


#: A sleeping process is only known not to answer, which takes the timeout.
WAYS = ("sleeps", "is killed", "is killed after its step", "raises")


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Iterator[tuple[float, dict[str, Processes]]]:
    """The time, and a group for each way to fail. All begin together, since they wait for most of the time."""
    begin = time.monotonic()
    groups = {how: Processes(3, tmp_path_factory.mktemp("group"), comparisons.one_fails, how) for how in WAYS}
    yield begin, groups
    for processes in groups.values():
        processes.wait(0)  # ends those of tests that were not selected


@pytest.mark.parametrize("how", WAYS)
def test_where_one_fails_the_others_end(begun, how):
    begin, groups = begun
    processes = groups[how]
    codes = processes.wait(60)
    assert time.monotonic() - begin < 60
    assert 0 not in codes and None not in codes
    for rank, text in enumerate(processes.printed()):
        if rank != comparisons.FAILING:
            # The rank is known if one process was waited for, but not if all were; processes are seen to end in a row.
            lost = r"process \d, rank \d of 3 that (hold one sequence|train together), has lost (process \d|one of)"
            assert re.search(lost, text), text
    if how == "is killed after its step":
        assert f"has lost process {comparisons.FAILING}, which ended" in processes.printed()[0]
    assert how != "raises" or "a mistake of its own" in processes.printed()[comparisons.FAILING]


class Two(nn.Module):
    """Two named layers, since torch 2.6 does not split ``nn.Sequential``."""

    def __init__(self, name: str, **options) -> None:
        super().__init__()
        self.first, self.second = (comparisons.Attending(name, **options) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        """x (B, n, 12)."""
        return self.second(self.first(x))


@pytest.mark.parametrize(("name", "options"), [("daft_full", {}), ("flow", {"clamp": None, "forget": "head"})])
def test_two_stages_of_a_pipeline_are_the_model(name, options):
    model, x = Two(name, **options), torch.randn(1, 9, 12)
    expected = model(x)
    pipe = pipeline(model, mb_args=(x,), split_spec={"second": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    assert_close("out", *pipe(x), expected)


@pytest.mark.skipif(not NEWER_THAN_2_6, reason="torch 2.6 cannot tell torch.export from torch.compile")
def test_directions_that_are_drawn_anew_are_refused_in_words():
    with pytest.raises(ValueError, match="redraw is 2.*allowed in torch.export.*pipelining"):
        torch.export.export(comparisons.Attending("favor", redraw=2), (torch.randn(1, 9, 12),), strict=False)
