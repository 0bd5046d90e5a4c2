"""Tests of the kernels need a GPU or Triton's interpreter; without either, ``test_interpreted`` runs them in it."""

import torch

from common.ops.shared.gpu.launch import interpreted

collect_ignore = [] if interpreted() or torch.cuda.is_available() else ["kernels"]
