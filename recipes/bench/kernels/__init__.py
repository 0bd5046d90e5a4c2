"""Triton kernels without a GPU: the arguments of their launches, and the compiler's report on them."""
