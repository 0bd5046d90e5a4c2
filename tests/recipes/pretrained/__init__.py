"""Tests of recipes/pretrained."""
