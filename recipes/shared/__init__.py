"""Helpers that several recipes share."""
