"""New corpora from the documents of others: merge, split, sample and shuffle, with origins kept.

All tokens are written by preprocessing/corpus_writer.py, and no corpus is changed.
"""
