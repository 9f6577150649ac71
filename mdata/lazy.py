"""Public names that are imported when they are first used, so that `import mdata` costs next to nothing.

`attach` gives a package's module a class of its own that looks a name up in a table. Importing a submodule sets it as
an attribute of its package: where it is called like a public name (mdata.preprocess is a function, mdata/preprocess/ a
package), that name stays what the table says, in any order of imports. Type checkers never see any of this; they read
the `if TYPE_CHECKING` part beside the table, and a test holds the two to each other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> None:
    """Make names of a package come from its modules on first use.

    Args:
        package: its name, as `__name__` says it.
        names: module -> the names that it gives, spaces between them; `a=b` is its b, `a=` the module itself.
    """
    module = sys.modules[package]
    module.__class__ = _Lazy
    # Past the class: its own way of setting looks at this table.
    module.__dict__["_homes"] = dict(_home(home, entry) for home, entries in names.items() for entry in entries.split())


def _home(module: str, entry: str) -> tuple[str, tuple[str, str]]:
    name, renamed, inside = entry.partition("=")
    return name, (module, inside if renamed else name)


class _Lazy(ModuleType):
    _homes: dict[str, tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there yet: the answer is kept.
        if name == "_homes" or name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home, inside = self._homes[name]
        module = import_module(home)
        value = getattr(module, inside) if inside else module
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        home, inside = self.__dict__.get("_homes", {}).get(name, ("", ""))
        # The import system hands over a submodule that it has just loaded.
        if inside and isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}":
            if home != value.__name__:
                return
            value = getattr(value, inside)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})
