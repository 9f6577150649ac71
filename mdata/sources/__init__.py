"""Text files in any supported format, read as chunks of bounded size and parsed into text columns with row numbers.

docs/reference/input.md lists what is accepted.
"""
