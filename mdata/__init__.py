"""From text to Megatron-format token files, to an exact order, to numpy batches. No torch anywhere in here.

This is the package of the distribution mdata-mtrain (cli/start.py looks for that name in it).
What users of the library need is in `mdata/__init__.pyi` and imported on first use; all else comes from the module
that defines it. Heavy libraries are imported where they are used.
"""

import warnings
from collections.abc import Callable
from typing import Any

import lazy_loader

from mdata.version import __version__ as __version__

_attribute: Callable[[str], object]
_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    # The names of before 0.1, until 0.2; type checkers and `dir` do not show them.
    if name == "open":
        warnings.warn("mdata.open is now mdata.open_dataset, with the same arguments", FutureWarning, stacklevel=2)
        return _attribute("open_dataset")
    if name == "options_from_keys":
        new = "mdata.DatasetOptions.from_keys({...})"
        warnings.warn(f"mdata.options_from_keys(...) is now {new}", FutureWarning, stacklevel=2)
        options: Any = _attribute("DatasetOptions")
        return lambda **keys: options.from_keys(keys)
    return _attribute(name)
