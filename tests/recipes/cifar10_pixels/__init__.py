"""Tests of recipes/cifar10_pixels."""
