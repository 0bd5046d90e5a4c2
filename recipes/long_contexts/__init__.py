"""Long contexts: models at several times the length that they were trained with, and one decoding step as a graph."""
