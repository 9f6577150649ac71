"""Whether a run may resume on a dataset: the same order of samples, or a blend made to continue it.

A checkpoint stores the data id and the number of consumed samples. Another data id is refused, with two exceptions: a
blend that `mdata blend --from` made of the checkpoint's, in one change or several, which differs from it only after the
consumed samples, read with the same options; and Megatron's order built for another number of samples, if the consumed
ones stay what they were. The trainer and `Sampler.restored` both use this. Not done here: saying which field of an
identity differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mdata.errors import UsageError, counted
from mdata.util.canonical_json import hash_of

Continued = tuple[str, int]
"""A data id that another one continues, and the number of samples after which they differ."""

if TYPE_CHECKING:
    from mdata.dataset.dataset import Dataset


def continued(dataset: Dataset) -> list[Continued]:
    """What a dataset continues; nothing for most datasets."""
    return [(hash_of(identity), until) for identity, until in _identities(dataset)]


def _identities(dataset: Dataset) -> list[tuple[object, int]]:
    return [(dataset.identity | {"blend": blend}, until) for blend, until in dataset.continued_blends.items()]


def resumes(dataset: Dataset, identity: Mapping[str, Any], *, consumed: int) -> bool:
    """Whether a run may resume on a dataset.

    Args:
        dataset: to be read from now on.
        identity: of the dataset that the run has read so far.
        consumed: samples read so far.

    Raises:
        UsageError: the dataset changes samples that the run has already read.
    """
    if goes_on(dict(identity), dataset.identity, continues=_identities(dataset), consumed=consumed):
        return True
    return other_length(dataset, identity) is not None


def other_length(dataset: Dataset, identity: Mapping[str, Any]) -> int | None:
    """The samples that Megatron's order was built for, where only that differs and the samples are the same."""
    before = identity.get("num_samples")
    if not isinstance(before, int) or before == dataset.identity.get("num_samples"):
        return None
    same = dict(identity) | {"num_samples": dataset.identity.get("num_samples")} == dataset.identity
    return before if same and dataset.same_order_for(before) else None


def goes_on(before: object, now: object, *, continues: Sequence[tuple[object, int]], consumed: int) -> bool:
    """`resumes` by identities or data ids: what the run has read, what there is now, and what that continues.

    Raises:
        UsageError: as `resumes`.
    """
    if before == now:
        return True
    until = next((until for earlier, until in continues if earlier == before), None)
    if until is None:
        return False
    if until < consumed:
        raise UsageError(
            "the blend changes at a sample that the run has already read",
            found=f"the blend changes at sample {until}; the run has read {counted(consumed, 'sample')}",
            expected=f"a change at sample {consumed} or later",
            fix=f"mdata blend --from OLD.json --at-sample {consumed} ..., or continue from an older checkpoint",
        )
    return True
