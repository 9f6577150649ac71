"""One corpus: its shards as one stream of tokens, its documents and where they came from; verify, adopt, convert."""
