"""What to run: one folder per experiment of the papers, and the demo. Run from a checkout; not installed."""
