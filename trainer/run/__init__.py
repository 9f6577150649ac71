"""A training run: the loop, its data, what it writes down, how it starts, stops and continues."""
