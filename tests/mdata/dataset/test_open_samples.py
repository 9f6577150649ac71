"""A process imports only the requested kind of samples and the modules that this kind needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import house_rules as house
from tests.helpers.corpora import write_pair

OTHERS = {
    "mdata.samples.single_document",
    "mdata.samples.packed",
    "mdata.samples.chat",
    "mdata.samples.fim",
    "mdata.samples.megatron_gpt",
    "mdata.samples.masked",
    "mdata.samples.bert",
    "mdata.samples.t5",
    "mdata.order.megatron_order",
    "mdata.mixing.resolve",
    "mdata.tokenizers",
    "numpy.ma",
    "csv",
    "tomllib",
}
USED = {
    "": set(),
    "kind=mdata.Document()": {"mdata.samples.single_document"},
    "kind=mdata.Packed()": {"mdata.samples.packed"},
    "order=mdata.MegatronOrder()": {"mdata.samples.megatron_gpt", "mdata.order.megatron_order"},
}
OPEN = """
import sys
import mdata
data = mdata.open_dataset({path!r}, sequence_length=4, {options})
data[0]
data.read([0, 1])
print(*sys.modules)
"""


@pytest.mark.parametrize("options", USED)
def test_the_first_sample_loads_no_kind_but_its_own(tmp_path, options):
    write_pair(tmp_path / "x", [[5, 3], [9], [7]])
    code = OPEN.format(path=str(tmp_path / "x"), options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=house.ROOT)
    assert OTHERS & set(done.stdout.split()) == USED[options]
