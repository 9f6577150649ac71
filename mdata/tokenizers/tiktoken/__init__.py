"""Files of tiktoken ranks, and the engine for them."""
