"""Sample number in, tokens out, over all corpora of a blend; the options that decide it; evaluation sets."""
