"""Parts of all Triton kernels: when they are used (``dispatch``), the check before that (``first_use``), their launch
(``launch``) and tiles (``tiles``).

Kernels are optional. Those of a mechanism lie in the folder ``gpu`` of its own: the host's side, whose ``applies`` says
which tensors they take; ``operator.py``, for torch.compile; and ``*kernels.py``, the device's side, which alone imports
Triton.
"""
