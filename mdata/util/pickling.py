"""Objects that are pickled as their constructor arguments.

Everything built from these (tables, maps of files, caches) is built again when they are unpickled. A new argument of
such a class is pickled without further code.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self


class PickledByArguments:
    """Base of classes whose arguments can be pickled, and do not change afterwards."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Keep the arguments."""
        made = super().__new__(cls)
        made._arguments = args, options
        return made

    def __reduce__(self) -> tuple[object, ...]:
        args, options = self._arguments
        return partial(type(self), **options), args
