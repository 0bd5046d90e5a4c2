"""Triton kernels without a GPU: what they are launched with, and what the compiler says of them."""
