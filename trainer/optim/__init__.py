"""Flat buffers and the distributed optimizer, learning rates."""
