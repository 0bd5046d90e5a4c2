"""CIFAR-10 as sequences of subpixels, and the completion of half an image."""
