"""The experiments of the papers, one folder each, with the demo and the benchmark. Run from a checkout."""

import logging

# Before fairseq is imported: one of its models sets logging up so that every library prints debug messages.
logging.basicConfig()
