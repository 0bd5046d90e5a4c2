"""What is compared with: the authors' released formulas, and attention written out as a map."""
