"""SentencePiece models: reading and checking them, the library, our own BPE engine, and its slow twin."""
