"""Models in other projects' files: read as our logical tensors, written from them."""
