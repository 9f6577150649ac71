"""The version of both packages, written here and nowhere else.

pyproject.toml reads it from this file, and the commands and manifests import it, so that it is right in a source tree
that was never installed too.
"""

__version__ = "0.0.1"
