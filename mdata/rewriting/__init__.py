"""Corpora made of the documents of others: parts merged, corpora split, sampled and shuffled, origins kept.

Whoever writes tokens writes them through preprocessing/corpus_writer.py, and no corpus is changed.
"""
