"""Splitting texts into sentences as NLTK's Punkt does: our own engine, NLTK, and the slow twin.

    load_splitter("english").split_batch(["One. Two."])     # (["One.", "Two."], [2])

Never the pickle, never the network. docs/sentences.md says what is split where.
"""
