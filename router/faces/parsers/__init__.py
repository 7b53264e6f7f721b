"""Parsers of answers: a model's text becomes text, reasoning and calls of tools while it streams."""
