"""Layers in the places of fairseq's: attention, Transformer layers, positions."""
