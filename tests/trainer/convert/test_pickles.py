"""The reader of foreign pickles: what pickle writes is read as it is, and no file takes more memory than its size."""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import pickle
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from trainer.convert.pickles import Made, Name, PickleFault, UnknownNames, unpickle

KEYS = st.none() | st.booleans() | st.integers(-(1 << 31), (1 << 31) - 1) | st.text(max_size=5) | st.binary(max_size=5)
SCALARS = KEYS | st.integers(-(1 << 200), 1 << 200) | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner, max_size=5)
    ),
    max_leaves=30,
)


def read(data: bytes):
    value, end = unpickle(memoryview(data))
    assert end == len(data)
    return value


@examples(200)
@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_those_that_pickle_reads(value, protocol):
    # Protocol 2 has no bytes: pickle writes a call that makes them.
    value = value if protocol > 2 else without_bytes(value)
    assert read(pickle.dumps(value, protocol)) == value


def without_bytes(value):
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, dict):
        return {without_bytes(key): without_bytes(inner) for key, inner in value.items()}
    return type(value)(map(without_bytes, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_are_what_they_were_made_of(protocol):
    shared = ["x"]
    value = {
        "args": argparse.Namespace(a=1, b=shared),
        "again": shared,
        "ordered": collections.OrderedDict(a=1),
        "set": {3},
        "frozen": frozenset([4]),
        "type": argparse.Namespace,
    }
    found = read(pickle.dumps(value, protocol))
    assert isinstance(found["args"], Made) and found["args"].kind == "argparse.Namespace"
    assert found["args"].state == {"a": 1, "b": ["x"]}
    assert found["args"].state["b"] is found["again"]
    assert found["ordered"] == {"a": 1} and found["type"] == Name("argparse.Namespace")
    assert protocol < 4 or (found["set"], found["frozen"]) == ([3], (4,))


class Calls:
    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return self.function, ("1 + 1",)


def test_every_name_that_is_not_on_the_list_is_told():
    value = [Calls(eval), Calls(exec), Calls(math.sqrt), argparse.Namespace()]
    for protocol in (2, 4):
        with pytest.raises(UnknownNames) as error:
            read(pickle.dumps(value, protocol))
        assert [name.rpartition(".")[2] for name in error.value.names] == ["eval", "exec", "sqrt"]
    # Also where the object is used in a way that would be an error of its own: a subclass of dict.
    with pytest.raises(UnknownNames, match="StrangeDict"):
        read(b"\x80\x02cstrange\nStrangeDict\n)R(U\x01aNu.")


def shared(levels: int, make) -> bytes:
    """Values of two references to the same value, level upon level: 2^levels of them."""
    first = b"\x80\x02N\x94"
    return first + b"".join(make(b"j" + struct.pack("<I", level)) + b"\x94" for level in range(levels)) + b"."


MANY = 50_000
NUMBERS = b"K\x01" * 50_000
BOMBS = {
    "nested tuples": b"\x80\x02N" + b"\x85" * MANY + b".",
    "nested lists": b"\x80\x02" + b"]" * MANY + b"a" * (MANY - 1) + b".",
    "nested dictionaries": b"\x80\x02" + b"}N" * MANY + b"Ns" + b"s" * (MANY - 1) + b".",
    "nested tuples as a key": b"\x80\x02})" + b"\x85" * MANY + b"Ns.",
    "nested objects": b"\x80\x02" + b"cargparse\nNamespace\n" * 20_000 + b")" + b"\x81\x85" * 20_000 + b".",
    "nested states": b"\x80\x02" + b"cargparse\nNamespace\n)\x81" * 20_000 + b"b" * 19_999 + b".",
    "marks": b"\x80\x02" + b"(" * MANY + b".",
    "memo index": b"\x80\x02Nr\xff\xff\xff\x07.",
    "memo index of a get": b"\x80\x02j\xff\xff\xff\x07.",
    "length of bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "length of a text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
    "length of a bytearray": b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.",
    "length of a frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
    "length of a long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "extension": b"\x80\x02\x82\x01.",
    "two of a list": b"\x80\x02]2a.",
    "a name without an end": b"\x80\x02c" + b"a" * 1_000_000,
    "a long name": b"\x80\x04X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"\x94" + b"h\x00\x93" * 1000 + b".",
    "shared tuples": shared(60, lambda get: get + get + b"\x86"),
    "shared lists": shared(60, lambda get: b"](" + get + get + b"e"),
    "shared dictionaries": shared(60, lambda get: b"}(K\x01" + get + b"K\x02" + get + b"u"),
    "shared objects": shared(60, lambda get: b"cargparse\nNamespace\n)\x81" + get + get + b"\x86b"),
    "a list of long lists": b"\x80\x02(" + NUMBERS + b"t\x94](" + b"h\x00" * 50_000 + b"e.",
    "a list in itself": b"\x80\x02]\x94h\x00a.",
    "a dictionary in itself": b"\x80\x02}\x94K\x01h\x00s.",
    "an object in itself": b"\x80\x02cargparse\nNamespace\n)\x81\x94h\x00b.",
    "long tuples as keys": b"\x80\x02(" + NUMBERS + b"t\x94}(" + b"h\x00N" * 50_000 + b"u.",
    "an integer whose hash is that of 0": b"\x80\x02}\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x1fNs.",
    "numbers as keys": b"\x80\x02}G\x7f\xf8\x00\x00\x00\x00\x00\x00Ns.",
    "a key without a value": b"\x80\x02}(K\x01u.",
    "appended to a tuple": b"\x80\x02)K\x01a.",
    "put into a list": b"\x80\x02]K\x01K\x02s.",
    "called by a number": b"\x80\x02K\x01)R.",
    "a state of a name": b"\x80\x02cargparse\nNamespace\n}b.",
    "nothing": b"",
    "a reference to the outside": b"\x80\x02K\x01Q.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_more_than_its_size_is_refused(name):
    """Memory is at most some hundred bytes for each byte, and the texts here have at most two million."""
    tracemalloc.start()
    try:
        with pytest.raises(PickleFault):
            read(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 + 200 * len(BOMBS[name])
    finally:
        tracemalloc.stop()


def test_the_same_bytes_are_not_copied_by_a_function():
    """torch's bytes are calls that make them of a text, which may be long and used again and again."""
    text = b"X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"\x94U\x06latin1\x86\x94"
    data = b"\x80\x02c_codecs\nencode\n\x94" + text + b"](" + b"h\x00h\x02R" * 1000 + b"e."
    tracemalloc.start()
    try:
        found = read(data)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert len(found) == 1000


SEED = pickle.dumps({"args": argparse.Namespace(a=[1, 2.5, None], b=("x", b"y")), (1, "k"): {"z": 1 << 70}}, 4)


@examples(300)
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=3), st.integers(0, len(SEED)))
def test_any_bytes_are_a_value_or_a_fault(changes, end):
    data = bytearray(SEED)
    for place, byte in changes:
        data[place] = byte
    for text in (bytes(data), bytes(data[:end])):
        with contextlib.suppress(PickleFault, UnknownNames):
            unpickle(memoryview(text))
