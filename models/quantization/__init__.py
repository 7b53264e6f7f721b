"""Quantised checkpoints as they are published: which tensors stand for a weight, and what they mean."""
