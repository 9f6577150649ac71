"""Public names that are imported on first use: one list three times, and names that are also modules."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mdata
import mdata.indexed
from mdata import version
from tests.helpers import house_rules as house

PACKAGES = {"mdata": mdata, "mdata.indexed": mdata.indexed}
BOTH = ("adopt", "build", "convert", "preprocess", "verify")  # public functions with modules of the same name


def for_type_checkers(package: ModuleType) -> dict[str, tuple[str, str]]:
    """Name -> (module, name in it, or "" for the module itself) of the `if TYPE_CHECKING` part."""
    found = {}
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    for node in block.body:
        for name in node.names:
            as_module = node.module == package.__name__
            home = f"{node.module}.{name.name}" if as_module else node.module
            found[name.asname or name.name] = (home, "" if as_module else name.name)
    return found


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_types_table_and_list_agree(package):
    assert for_type_checkers(package) == package._homes
    assert sorted(package._homes) == sorted(package.__all__)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_every_name_is_what_its_module_has(package):
    for name, (home, inside) in package._homes.items():
        module = importlib.import_module(home)
        assert getattr(package, name) is (getattr(module, inside) if inside else module), name
    assert set(package.__all__) <= set(dir(package))
    assert "__file__" in dir(package)


def test_what_is_not_there_is_told():
    with pytest.raises(AttributeError, match="module 'mdata' has no attribute 'opne'"):
        _ = mdata.opne
    with pytest.raises(ImportError, match="opne"):
        exec("from mdata import opne")


def run(code: str) -> str:
    check = f"import types\nassert not any(isinstance(getattr(mdata, n), types.ModuleType) for n in {BOTH})\n"
    return subprocess.run(
        [sys.executable, "-c", code + "\n" + check], capture_output=True, text=True, check=True, cwd=house.ROOT
    ).stdout


MODULES = "import mdata.preprocess.run, mdata.verify, mdata.convert, mdata.adopt"
ORDERS = {
    "modules first": MODULES + "\nimport mdata",
    "names first": f"import mdata\nfor n in {BOTH}: getattr(mdata, n)\n{MODULES}",
    "names of modules": "from mdata.verify import verify as v\nimport mdata\nassert mdata.verify is v\n" + MODULES,
    "from": f"from mdata import {', '.join(BOTH)}\nimport mdata\nassert verify is mdata.verify",
    "by hand": f"import importlib, mdata\nfor n in {BOTH}: importlib.import_module('mdata.' + n)",
    "as": "import mdata.verify as v, mdata.preprocess as p\nimport mdata\nassert v is mdata.verify and callable(p)",
    "star": "from mdata import *\nimport mdata\nassert verify is mdata.verify and load_manifest is mdata.load_manifest",
    "again": f"import importlib, mdata\n{MODULES}\nimportlib.reload(mdata)",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_functions_stay_functions_in_any_order_of_imports(order):
    run(order)


def test_importing_costs_nothing_that_is_not_used():
    code = "import sys, mdata\nprint([m for m in ('numpy', 'mdata.dataset', 'mdata.errors') if m in sys.modules])"
    assert run(code) == "[]\n"
    heavy = (
        "mdata.preprocess",
        "mdata.indexed.writer",
        "mdata.indexed.legacy",
        "concurrent.futures",
    )
    code = f"import sys, mdata\nmdata.open\nprint([m for m in {heavy} if m in sys.modules])"
    assert run(code) == "[]\n"


def test_a_name_can_be_replaced_by_hand(monkeypatch):
    monkeypatch.setattr(mdata, "verify", 3)
    assert mdata.verify == 3
    monkeypatch.undo()
    assert callable(mdata.verify)


def test_the_version_is_public():
    assert mdata.__version__ == version.__version__
    assert run("import mdata\nprint(mdata.__version__)").startswith(version.__version__)
