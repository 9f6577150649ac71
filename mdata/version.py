"""The version of both packages, written here and nowhere else; also right in a source tree that is not installed."""

__version__ = "0.0.1"
