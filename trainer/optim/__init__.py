"""Flat buffers, the distributed optimizer, and learning rates."""
