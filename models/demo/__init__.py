"""The shipped demo model: its checkpoint, its text and its training script."""
