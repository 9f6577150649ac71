"""Models: each a forward pass that reads like its paper, beside a table of how it is split."""
