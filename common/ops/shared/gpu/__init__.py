"""Parts of all Triton kernels: when they are used (``dispatch``), the check before that (``first_use``), their launch
(``launch``) and tiles (``tiles``); and the kernels of another package for running sums and the delta rule (``fla``).

Kernels are optional. Those of a mechanism are in its own folder ``gpu``: the host side, whose ``applies`` determines
which tensors are supported; ``operator.py``, for torch.compile; and ``*kernels.py`` and ``tiles.py``, the device side,
the only files that import Triton.
"""
