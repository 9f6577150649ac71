"""The console scripts mdata and mtrain: each command parses, calls one function of a library, and prints."""
