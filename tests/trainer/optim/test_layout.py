"""Buffer layouts: no overlap, one rule a segment, shards that cut anywhere."""

from __future__ import annotations

import pytest

from tests.trainer.shapes import SHAPES
from trainer.models.gpt_params import parameter_table
from trainer.optim.layout import ALIGNMENT, make_layout


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_slots_segments_and_shards_fit_together(name, dp):
    specs = parameter_table(SHAPES[name], tp_size=2, tp_rank=1, sequence_parallel=True)
    layout = make_layout(specs, dp_size=dp)
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(spec.name for spec in specs)
    end = 0
    for slot in layout.slots:
        assert slot.start >= end
        assert slot.start % ALIGNMENT == 0
        end = slot.start + slot.spec.numel
        (segment,) = (s for s in layout.segments if s.start <= slot.start < s.stop)
        assert end <= segment.stop
        assert (segment.decay, segment.over_tp) == (slot.spec.decay, slot.spec.over_tp)
    assert [s.start for s in layout.segments] + [layout.size] == [0] + [s.stop for s in layout.segments]
    assert layout.size % dp == 0
    shards = [layout.shard(rank) for rank in range(dp)]
    assert [a for a, _ in shards] + [layout.size] == [0] + [b for _, b in shards]


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_shards_together_give_every_logical_slice_once(dp):
    specs = parameter_table(SHAPES["gpt2"], tp_size=2, tp_rank=0)
    layout = make_layout(specs, dp_size=dp)
    seen: dict[str, int] = {}
    for rank in range(dp):
        for _, part, first in layout.slices_within(*layout.shard(rank)):
            assert layout.shard(rank)[0] <= first < layout.shard(rank)[1]
            rows, *rest = part.size
            seen[part.name] = seen.get(part.name, 0) + rows * (rest[0] if rest else 1)
    expected = {p.name: p.size for spec in specs for p in spec.pieces}
    assert seen == {name: size[0] * (size[1] if len(size) > 1 else 1) for name, size in expected.items()}


def test_segments_within_are_cut_to_the_range():
    layout = make_layout(parameter_table(SHAPES["gpt2"], tp_size=1, tp_rank=0), dp_size=1)
    first = layout.segments[0]
    cut = list(layout.segments_within(first.start + 1, first.stop + 1))
    assert (cut[0].start, cut[0].stop, cut[1].start, cut[1].stop) == (
        first.start + 1,
        first.stop,
        first.stop,
        first.stop + 1,
    )
