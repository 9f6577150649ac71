"""Files of tiktoken ranks, the engine for them, and its slow twin."""
