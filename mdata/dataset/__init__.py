"""Sample number in, tokens out, over all corpora of a blend; its options; evaluation sets."""
