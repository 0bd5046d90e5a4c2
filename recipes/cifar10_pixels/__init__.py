"""Pixels: images as sequences of subpixels, and the completion of an image."""
