"""Structured logging and tracing."""
