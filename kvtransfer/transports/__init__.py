"""Ways to move a block's bytes."""
