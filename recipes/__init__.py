"""What to run: one folder per experiment of the papers, and the demo. Run from a checkout; not installed."""

import logging

# Before fairseq does: one of its models, when imported, makes every library tell all it does.
logging.basicConfig()
