"""Time series classification: the ten UEA data sets of the Flowformer paper's Table 6."""
