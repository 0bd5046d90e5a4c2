"""Small tasks for lm-evaluation-harness that need no network."""
