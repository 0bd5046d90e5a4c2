"""Tests of recipes/flash."""
