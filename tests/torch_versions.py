"""Descriptions of features that the oldest supported torch lacks, for the tests that need them."""

import pytest
import torch

#: torch 2.6 cannot tell torch.export from torch.compile, which therefore uses plain PyTorch and no kernels. It cannot
#: prove that windows of a sequence or an image are right for any length, and so exports them with a fixed length and
#: recompiles some models for another length. Its torch.compile refuses packed documents, as torch.export does,
#: and treats Combiner's length as a constant. Its ONNX graphs of steps have a fixed number of rows.
NEWER_THAN_2_6 = hasattr(torch.compiler, "is_exporting")
needs_newer_than_2_6 = pytest.mark.skipif(
    not NEWER_THAN_2_6,
    reason="needs a torch newer than 2.6: torch.export at any size; kernels and packed documents under torch.compile",
)

#: In torch 2.6, CPU streams, which do nothing, lack a method that ``fully_shard`` calls.
needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="needs a torch newer than 2.6: before, FSDP2 computes on a GPU alone",
)
