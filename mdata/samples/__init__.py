"""A class for each kind of sample: rows of tokens, labels and masks from a corpus and an order."""
