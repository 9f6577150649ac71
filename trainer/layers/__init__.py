"""The layers of a transformer, each one rank's share of it; activations are [N, D], one row a token."""
