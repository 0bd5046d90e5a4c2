"""Tests of recipes/imagenet."""
