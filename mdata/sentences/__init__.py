"""Sentence splitting as NLTK's Punkt does it, from the four tables of a language (punkt_tab).

    load_splitter("english").split_batch(["One. Two."])     # (["One.", "Two."], [2])

Never the pickle, never the network. docs/sentences.md says what is split where.
"""

from mdata.sentences.choice import build_splitter, load_splitter
from mdata.sentences.splitter import Splitter

__all__ = ["Splitter", "build_splitter", "load_splitter"]
