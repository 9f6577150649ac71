"""No garbage collection inside the block, and the previous state after it, also after an error and when nested."""

from __future__ import annotations

import gc

import pytest

from mdata.util.gc_pause import gc_paused


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_it_was_before(on):
    was_on = gc.isenabled()
    gc.enable() if on else gc.disable()
    try:
        with pytest.raises(KeyError), gc_paused():
            with gc_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == on
    finally:
        gc.enable() if was_on else gc.disable()
