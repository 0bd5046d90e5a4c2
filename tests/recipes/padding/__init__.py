"""Tests of recipes/padding."""
