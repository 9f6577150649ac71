"""Memory comes back when nobody can see it any more, not before, and not without bound."""

from __future__ import annotations

import gc
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.loader.buffer_pool import Buffers
from tests.helpers.examples import examples

KEEPS = {
    "the array": lambda array: array,
    "a view": lambda array: array[:, 1:],
    "a view of a view": lambda array: array.T[1:][0],
    "a memoryview": lambda array: memoryview(array),
    "another type": lambda array: array.view(np.uint8),
    "a field of a record": lambda array: array.view([("low", np.int32), ("high", np.int32)])["high"],
}


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@examples(100)
@given(st.lists(st.tuples(st.sampled_from(list(KEEPS)), st.integers(0, 3)), max_size=40), st.integers(1, 3))
def test_what_is_kept_never_changes(steps, waiting):
    """Each array is filled with its number; of those kept one is dropped now and then."""
    buffers, kept = Buffers(waiting), []
    for number, (how, dropped) in enumerate(steps):
        array = buffers.empty((2, 3), np.int64)
        assert array.flags.writeable and array.shape == (2, 3) and array.dtype == np.int64
        array[:] = number
        kept.append((KEEPS[how](array), np.array(KEEPS[how](array))))
        del array
        del kept[:dropped]
        assert all(np.array_equal(view, copy) for view, copy in kept)


def test_a_tensor_keeps_its_memory():
    torch = pytest.importorskip("torch")
    buffers = Buffers(2)
    tensor = torch.from_numpy(buffers.empty((2, 3), np.int64))[:, 1:]
    tensor[:] = 5
    for _ in range(3):
        buffers.empty((2, 3), np.int64)[:] = 6
    assert (tensor == 5).all()
    known = tensor.data_ptr() - 8
    del tensor
    assert address(buffers.empty((2, 3), np.int64)) == known


def test_shapes_and_types_do_not_share_memory():
    buffers = Buffers(4)
    addresses = [address(buffers.empty((2, 3), np.int64)) for _ in range(3)]
    assert len(set(addresses)) == 1
    for shape, dtype in (((3, 2), np.int64), ((2, 3), np.float64)):
        assert address(buffers.empty(shape, dtype)) != addresses[0]


@pytest.mark.parametrize("waiting", [1, 3])
def test_no_more_waits_than_is_asked_for(waiting):
    size = 100_000
    buffers = Buffers(waiting)
    gc.collect()
    tracemalloc.start()
    try:
        kept = [buffers.empty((1, size), np.uint8) for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] > 10 * size
        del kept
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert waiting * size <= held < (waiting + 1) * size


def test_memory_may_come_back_in_another_thread():
    buffers, wrong = Buffers(4), []

    def work(number: int) -> None:
        for _ in range(300):
            arrays = [buffers.empty((1, 64), np.int64) for _ in range(3)]
            for array in arrays:
                array[:] = number
            if not all((array == number).all() for array in arrays):
                wrong.append(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what one of them raised
    assert not wrong
