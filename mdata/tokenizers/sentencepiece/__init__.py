"""SentencePiece models: reading and checking them, the library, and our own BPE engine."""
