"""Fuzzers over what reads foreign bytes: the .idx reader, its C++ checks, and the record readers.

fuzz/README.md tells how to run them; each target is a function `check(data)` that raises where a rule is broken.
"""
