"""Layers in the places of timm's: attention, blocks, position embedding."""
