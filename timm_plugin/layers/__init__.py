"""Layers that replace those of timm: attention, blocks, position embedding."""
