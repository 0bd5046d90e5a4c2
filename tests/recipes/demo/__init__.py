"""Tests of recipes/demo."""
