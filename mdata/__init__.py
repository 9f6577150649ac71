"""From text to Megatron-format token files, to an exact order, to numpy batches. No torch anywhere in here.

This is the package of the distribution mdata-mtrain (cli/start.py looks for that name in it).
What users of the library need is in `mdata/__init__.pyi` and imported on first use; all else comes from the module
that defines it. Heavy libraries are imported where they are used.
"""

import lazy_loader

from mdata.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
