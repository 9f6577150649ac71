"""Reading and writing .bin/.idx pairs, the token files of Megatron.

docs/reference/formats.md describes the bytes. Hashes of files and ids belong to the manifest.
"""
