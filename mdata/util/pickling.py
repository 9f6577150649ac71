"""Objects that are pickled as the arguments they were made from.

What they built from these (tables, maps of files, caches) is built again where they are unpickled. A new argument of
such a class is pickled without another line.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self


class PickledByArguments:
    """Base of classes whose arguments can be pickled, and are not changed afterwards."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Keep the arguments."""
        made = super().__new__(cls)
        made._arguments = args, options
        return made

    def __reduce__(self) -> tuple[object, ...]:
        args, options = self._arguments
        return partial(type(self), **options), args
