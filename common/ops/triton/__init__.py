"""Kernels for GPUs, optional: the same functions as the PyTorch forms beside this folder, in Triton.

``dispatch`` says when they are used and knows no mechanism's mathematics; it imports nothing of Triton. Each mechanism
has two files, imported when a tensor first asks for them: ``<mechanism>_kernels.py``, what runs on the device, and
``<mechanism>.py``, which strings the kernels together and gives them their gradient.
"""
