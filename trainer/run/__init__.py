"""A training run: the loop, its data, its log files, and how it starts, stops and continues."""
