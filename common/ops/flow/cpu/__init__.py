"""Causal Flow-Attention on a CPU as kernels: ``causal`` is called from PyTorch; the others are compiled by Numba."""

#: Numbers of each token and head that the backward pass needs: I, O, Ô, competition and allocation.
KEPT = 5
