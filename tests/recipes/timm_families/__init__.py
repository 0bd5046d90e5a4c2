"""Tests of recipes/timm_families."""
