"""Commands compute in plain PyTorch, but for one file and the READMEs: each process loads kernels for a second."""

import pytest

#: Tests of commands with kernels for CPUs, in several processes.
WITH_KERNELS = "test_context_parallel"


@pytest.fixture(autouse=True, scope="module")
def plain_pytorch(request: pytest.FixtureRequest):
    """Turn kernels for CPUs off for a file, and for the processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith(WITH_KERNELS):
            patch.setenv("LINEARTIME_CPU_KERNELS", "0")
        yield
