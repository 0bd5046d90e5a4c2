"""Kernels for CPUs, written in Python and compiled by Numba; ``README.md`` says how they work.

``dispatch`` says when they are used, ``threads`` runs them on several threads, ``compiler`` and ``memory`` are what
they are written with. Only files that hold kernels import Numba, and they are imported at the first use.
"""
