"""From a sample of training back to documents, files and rows, and from a document to the samples that read it.

`trace` answers for a dataset, `steps` knows ranks and global batches, `run` reads the run folder of a training.
"""
