"""Blocks of corpora in object storage, kept on a node's disk: fetched when they are first read, checked, evicted."""
