"""Tests of recipes/package."""
