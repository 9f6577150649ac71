"""Models: a forward pass that reads like the paper, and a table of how the model is split."""
