"""Which parameters are reduced and gathered together: whole blocks, the last used first. Pure, no torch.

A bucket's gradients are then complete while backward continues below it, and its parameters can be gathered before
forward needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from trainer.parallel.params import ParamSpec

MIN_BUCKET = 1 << 14  # elements; a message below this costs what an empty one does
MOST_BUCKETS = 64  # of a model whose blocks are small beside the rest


def cut_buckets(specs: Sequence[ParamSpec], *, bucket_size: int = 0) -> Iterator[list[ParamSpec]]:
    """The parameters of each bucket, which all have one shard axis; the order depends only on the specs.

    Those of each shard axis are cut apart from the others: in a model with experts the axes change in every block.
    A parameter that two pipeline stages share is complete last and gets its own bucket. Frozen ones come last.

    Args:
        bucket_size: least elements of a bucket, if there are enough; 0: a 64th of all, or of all frozen ones.
    """
    total = {frozen: sum(spec.numel for spec in specs if spec.frozen == frozen) for frozen in (False, True)}
    ordered = sorted(specs, key=lambda spec: (spec.frozen, "ends" in spec.partial, spec.shard, -spec.block))
    for (frozen, *_), alike in itertools.groupby(
        ordered, key=lambda spec: (spec.frozen, spec.shard, "ends" in spec.partial)
    ):
        least = bucket_size or max(total[frozen] // MOST_BUCKETS, MIN_BUCKET)
        held: list[ParamSpec] = []
        for _, block in itertools.groupby(alike, key=lambda spec: spec.block):
            held += block
            if sum(spec.numel for spec in held) >= least:
                yield held
                held = []
        if held:
            yield held
