"""Leaks into real tokens, from padding, later tokens and batch neighbours: here and in public packages."""
