"""The version of both packages, defined only here.

pyproject.toml reads it from this file, and the commands and manifests import it, so it is also right in a source tree
that was never installed.
"""

__version__ = "0.0.1"
