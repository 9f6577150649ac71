"""Reading models of other projects as our logical tensors, and writing them."""
