"""Features that the oldest allowed torch lacks, in words, for the tests that need them."""

import pytest
import torch

#: torch 2.6 cannot tell torch.export from torch.compile, which therefore sees plain PyTorch and no kernels. It cannot
#: prove that windows of a sequence or an image are right for any length, and so exports them with one length alone and
#: compiles some models once more for another one. Its torch.compile refuses packed documents, as torch.export does,
#: and takes Combiner's length as a constant. Its ONNX graphs of steps are for one number of rows.
NEWER_THAN_2_6 = hasattr(torch.compiler, "is_exporting")
needs_newer_than_2_6 = pytest.mark.skipif(
    not NEWER_THAN_2_6,
    reason="needs a torch newer than 2.6: torch.export at any size; kernels and packed documents under torch.compile",
)

#: The streams of a CPU, which do nothing, lack in torch 2.6 a method that ``fully_shard`` calls.
needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="needs a torch newer than 2.6: before, FSDP2 computes on a GPU alone",
)
