"""Our own WordPiece engine: the engine, the check of which tokenizers it supports, and its slow twin."""
