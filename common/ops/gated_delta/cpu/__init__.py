"""Kernels of the gated delta rule for CPUs."""
