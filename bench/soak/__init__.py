"""Faults of every kind under callers that check every answer."""
