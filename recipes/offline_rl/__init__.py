"""Offline reinforcement learning: the D4RL experiment of the Flowformer paper's Table 7, and one on your own data."""
