"""Tests of recipes/papers."""
