"""Fixtures of the tests of kernels."""

from tests.common.ops.shared.gpu.device import *  # noqa: F403
