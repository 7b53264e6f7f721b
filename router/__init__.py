"""The process that clients talk to: admits, places, and owns every request. Never reaches torch."""
