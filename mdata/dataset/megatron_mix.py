"""How Megatron mixes corpora: how many samples are built for each, and which component gives which sample of the blend.

With shares, each corpus is built for its part of the requested samples plus a surplus, and mixed by weight. Without
shares, corpora count by their size: each is built for one epoch and mixed by its number of samples; if no number of
samples was requested, every sample comes once. What differs from Megatron: without shares, a corpus that has no sample
in the split is left out; with a share, it is refused by name (Megatron fails a bare assertion). How samples are made:
open_samples.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from mdata.blend.blend import OpenBlend
from mdata.blend.share_texts import weights_set_by
from mdata.errors import UsageError
from mdata.mixing.megatron_blend import (
    NAME,
    VERSION,
    CacheBeside,
    MegatronBlend,
    exhaustive,
    normalise,
    requests,
    weighted,
)
from mdata.mixing.shares import USER
from mdata.samples.base import Samples
from mdata.samples.megatron_gpt import MegatronGptSamples

Open = Callable[[int, int | None], Samples | None]
"""Opens component i for this many samples (None: one epoch); None if its split is empty."""


def open_mixed(
    blend: OpenBlend, open_one: Open, *, num_samples: int | None, surplus: float, cache: CacheBeside
) -> tuple[list[Samples | None], MegatronBlend | None, dict[str, Any]]:
    """Open the components of a blend as Megatron mixes them.

    Args:
        blend: with weights, or with corpora that count by their size.
        open_one: opens the samples of one corpus.
        num_samples: requested for the blend.
        surplus: built beyond the part of each corpus, if there are shares.
        cache: for the arrays of the blend.

    Returns:
        The components; the mix (None for a single corpus, or if the split is empty for all); and the part of the
        dataset's identity that covers the mix.

    Raises:
        UsageError: the blend uses more than weights; and the errors of `mix_by_share`.
    """
    if not blend.only_weights:
        raise UsageError(
            "Megatron's order supports only weights",
            found="phases, amounts, groups with shares, or caps",
            expected='a blend of weights, or order "native"',
        )
    parts = blend.manifest.components
    if not blend.counts_by_tokens:
        shares = [(part.name, part.share) for part in parts]
        kinds, mix = mix_by_share(open_one, shares, num_samples=num_samples, surplus=surplus, cache=cache)
        return kinds, mix, mix_identity(blend, surplus)
    if len(parts) == 1:
        return [open_one(0, num_samples)], None, {}
    kinds, mix = mix_by_size(open_one, len(parts), num_samples=num_samples, cache=cache)
    return kinds, mix, mix_identity(blend, None)


def mix_by_share(
    open_one: Open, shares: Sequence[tuple[str, str]], *, num_samples: int | None, surplus: float, cache: CacheBeside
) -> tuple[list[Samples | None], MegatronBlend | None]:
    """Open components for their shares of the samples.

    Args:
        open_one: opens the samples of one corpus.
        shares: name and share of each.
        num_samples: requested for the blend.
        surplus: built beyond the part of each corpus.
        cache: for the arrays of the blend.

    Returns:
        The components and the mix; (all None, None) if the split is empty for all.

    Raises:
        UsageError: no number of samples, a share that is not above 0, a component without samples, or one from which
            the blend would take more samples than it has.
    """
    if num_samples is None:
        raise UsageError(
            "a blend with shares in Megatron's order needs the number of samples: it decides how much of each is built",
            found=", ".join(name for name, _ in shares[:4]),
            fix="set num_samples (mdata build: --train-samples), or leave the shares out: each corpus then counts by "
            "its size",
        )
    names = [name for name, _ in shares]
    normalised, targets, wanted = requests([_number(share) for _, share in shares], num_samples, surplus=surplus)
    parts = [open_one(i, request) for i, request in enumerate(wanted)]
    if not any(parts):
        return parts, None
    for name, part, request in zip(names, parts, wanted, strict=True):
        if part is None or not part.num_samples:
            raise UsageError(
                f"{name} has a share of the blend and no sample in the split",
                found=f"0 samples, {request} are to be built",
                fix="a larger share of the split, or leave it out",
            )
    blend = weighted(normalised, sum(targets), cache=cache)
    blend.check([part.num_samples or 0 for part in parts if part], names, requested=wanted)
    return parts, blend


def mix_by_size(
    open_one: Open, count: int, *, num_samples: int | None, cache: CacheBeside
) -> tuple[list[Samples | None], MegatronBlend | None]:
    """Open components for one epoch each; see `mix_by_share`. A component without samples is None."""
    opened = [open_one(i, None) for i in range(count)]
    parts = [part if part is not None and part.num_samples else None for part in opened]
    sizes = [part.num_samples or 0 for part in parts if part is not None]
    if not sizes:
        return parts, None
    if num_samples is None:
        return parts, exhaustive(sizes, cache=cache)
    blend = weighted(sizes, min(num_samples, sum(sizes)), cache=cache)
    blend.check(sizes, [f"component {i}" for i, part in enumerate(parts) if part is not None])
    return parts, blend


def same_order(blend: OpenBlend, parts: Sequence[Samples], *, num_samples: int, surplus: float) -> bool:
    """Whether a blend that is built for another number of samples has the same ones, as far as both go.

    Which component sample k is of depends on the weights and the samples before it. Which of its samples that is
    depends on how many are requested of it; corpora that count by their size have one epoch whatever is asked.

    Args:
        parts: the components' samples, as `open_mixed` has opened them for the present number.
    """
    components = blend.manifest.components
    if not all(isinstance(part, MegatronGptSamples) for part in parts):
        return False
    if not blend.counts_by_tokens:
        _, _, wanted = requests([_number(part.share) for part in components], num_samples, surplus=surplus)
    elif len(components) == 1:
        wanted = [num_samples]
    else:
        return True
    return all(
        part.same_for(request)
        for part, request in zip(parts, wanted, strict=True)
        if isinstance(part, MegatronGptSamples)
    )


def mix_identity(blend: OpenBlend, surplus: float | None) -> dict[str, Any]:
    """The fields of a dataset's identity for Megatron's blends, besides the blend's id.

    The id covers the exact ratio of the weights, but Megatron's order depends on doubles: those of `0.1 a 0.2 b 0.3 c`
    differ from those of `1 a 2 b 3 c`. The doubles are stored in hex. They are left out if they equal those of the
    ratio in integers (which the id covers), and if the user gave no weights (a power of the tokens has only one
    notation).

    Args:
        blend: with weights. surplus: built beyond the part of each corpus; None: components count by their size.
    """
    fields: dict[str, Any] = {"blend_algorithm": f"{NAME} {VERSION}"}
    if surplus is None:
        return fields
    fields["blend_surplus"] = repr(surplus)
    weights = normalise([_number(part.share) for part in blend.manifest.components])
    by_user = USER in weights_set_by(blend.manifest, [corpus.num_tokens for corpus in blend.corpora])
    if by_user and weights != normalise(blend.weights):
        fields["blend_weights"] = [weight.hex() for weight in weights]
    return fields


def _number(share: str) -> float:
    return float(Fraction(share)) if "/" in share else float(share)
