"""Helpers of several recipes."""
