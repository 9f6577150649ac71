"""Text files in any supported format, read as chunks of bounded size and parsed into columns of text that know their
rows.

docs/input.md says what is accepted.
"""
