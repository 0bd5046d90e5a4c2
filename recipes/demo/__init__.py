"""The main job on real input in under ten minutes: ``python -m recipes.demo`` from the checkout's root.

A Flowformer language model and its softmax peers learn the running interpreter's standard library through fairseq's
own command line, a hierarchical Flowformer learns scikit-learn's handwritten digits through timm's own parts, and one
table and one picture come out.
"""
