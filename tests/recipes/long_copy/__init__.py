"""Tests of long copy."""
