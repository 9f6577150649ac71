"""Splitting texts into sentences as NLTK's Punkt does: our own engine, NLTK, and the slow twin.

    load_splitter("english").split_batch(["One. Two."])     # (["One.", "Two."], [2])

NLTK's pickle is never loaded, and nothing is downloaded. docs/reference/sentences.md explains the rules.
"""
