"""One sequence over several processes, compared with one process."""

import pytest
import torch
from torch import nn

from common.attention import build_attention
from common.modules import GatedAttentionUnit
from common.parallel import ContextGroup, check_context_parallel, own_part, part_length
from tests.common.parallel import comparisons
from tests.common.parallel.processes import in_processes


def test_every_mechanism_gives_what_one_process_gives(tmp_path):
    """Every mechanism, in one start of four processes."""
    in_processes(4, tmp_path, comparisons.every_mechanism)


@pytest.mark.parametrize(
    "comparison",
    [
        comparisons.training_under_data_parallelism,
        comparisons.gated_attention_units,
        comparisons.compiled_window,
        comparisons.flow_of_one_row,
        comparisons.many_rows,
        comparisons.gradients_of_gradients_are_refused,
        comparisons.random_draws,
        comparisons.counted_bytes,
    ],
    ids=lambda x: x.__name__,
)
def test_three_processes(tmp_path, comparison):
    in_processes(3, tmp_path, comparison)


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
