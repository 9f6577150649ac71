"""New corpora from the documents of others: merge, split, sample and shuffle, with origins kept.

Whoever writes tokens writes them through preprocessing/corpus_writer.py, and no corpus is changed.
"""
