"""Implementations to compare with: the authors' released formulas, and attention written out as a map."""
