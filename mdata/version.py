"""The version and the name of the distribution, which holds both packages; defined only here.

pyproject.toml reads the version from this file, and the commands and manifests import it, so it is also right in a
source tree that was never installed. On the package index, "mdata" is another project.
"""

__version__ = "0.1.0"
DISTRIBUTION = "mdata-mtrain"
