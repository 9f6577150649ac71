"""Checkpoints: named slices of logical tensors, readable in any layout."""
