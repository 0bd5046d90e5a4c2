"""Layers that replace fairseq's: attention, Transformer layers, positions."""
