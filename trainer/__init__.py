"""The companion trainer of mdata-mtrain: GPT over any layout of ranks, with numbers that do not depend on the layout.

What programs of users need is in `trainer/__init__.pyi` and imported on first use; importing this imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
