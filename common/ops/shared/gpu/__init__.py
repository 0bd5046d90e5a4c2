"""Parts of all Triton kernels: when they are used (``dispatch``), the check before that (``first_use``), their launch
(``launch``) and tiles (``tiles``).

Kernels are optional. Those of a mechanism lie in its own folder, in two files: ``*gpu.py``, the host's side, whose
``applies`` says which tensors they take, and ``*gpu_kernels.py``, the device's side, which alone imports Triton.
"""
