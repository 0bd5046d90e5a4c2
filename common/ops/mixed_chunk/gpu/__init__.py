"""Mixed chunk attention of a whole sequence on a GPU: ``sequence`` is the host's side of the Triton ``kernels``, and
``operator`` what torch.compile calls.
"""
