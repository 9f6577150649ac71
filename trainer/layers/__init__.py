"""The layers of a transformer, each holding one rank's share; activations are [N, D], one row per token."""
