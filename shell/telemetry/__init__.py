"""Structured logging and trace context."""
