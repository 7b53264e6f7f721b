"""Measurements that anyone can repeat; nothing imports this package."""
