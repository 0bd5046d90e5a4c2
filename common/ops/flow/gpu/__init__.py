"""Causal Flow-Attention on a GPU: ``causal`` chooses between ``walk`` and ``chunks``, the host's sides of the Triton
kernels in ``walk_kernels`` and ``chunks_kernels``; ``operator`` is what torch.compile calls.
"""
