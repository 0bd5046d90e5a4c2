"""Causal Flow-Attention on a GPU: ``causal`` is the function with gradients, ``chunks`` the host's side of the Triton
kernels in ``chunks_kernels``, and ``operator`` what torch.compile calls.
"""
