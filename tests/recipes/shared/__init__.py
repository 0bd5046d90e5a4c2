"""Tests of recipes/shared."""
