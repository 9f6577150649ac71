"""Our own WordPiece engine, and the check of which tokenizers it supports."""
