"""Checkpoints: named slices of logical tensors, which any layout reads."""
