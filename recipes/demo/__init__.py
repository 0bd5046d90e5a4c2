"""Train on real data in under ten minutes: ``python -m recipes.demo`` from the checkout's root.

A Flowformer language model and softmax baselines learn Python's standard library with fairseq's command line, and a
hierarchical Flowformer learns scikit-learn's handwritten digits with timm. The results are one table and one picture.
"""
