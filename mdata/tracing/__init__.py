"""From a sample, step or rank back to documents, files and rows; and from a document to its samples."""
