"""Attention back-ends and other hot operations behind a small interface."""
