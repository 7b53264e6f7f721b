"""Attention back-ends and other hot operations behind one small interface."""
