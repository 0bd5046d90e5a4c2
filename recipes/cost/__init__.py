"""Multiply-adds, parameters and memory of any model of either host."""
