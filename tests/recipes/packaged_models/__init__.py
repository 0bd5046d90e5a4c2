"""Tests of recipes/packaged_models."""
