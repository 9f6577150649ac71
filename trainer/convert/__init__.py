"""Reads models of other projects as our logical tensors, and writes them."""
