"""Twin of the path from Megatron's --data-path to its order: samples built per corpus, and the corpus of each sample.

Follows only the words of the format. An even number of words with numbers at positions 0, 2, 4 ... is pairs of weight
and prefix. Weights are doubles as Python's float reads them (or 1/3, our addition). Whether there are weights depends
on the form of the words, never on their values. A function gives the number of samples that a corpus has when built for
a given number. The fast code is mdata/dataset/megatron_mix.py; the fills are in tests/reference/megatron_blend.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.reference.megatron_blend import exhaustive, pairwise_sum, requests, weighted


class Refused(Exception):
    """Megatron refuses these words, or fails on the way."""


@dataclass(frozen=True)
class Mixed:
    """A split of a run.

    Args:
        prefixes: of the corpora. requests: number of samples built for each; None: one epoch.
        order: (component, sample inside it) of each sample.
        is_blend: whether there is a blend object; otherwise the single corpus is read directly.
    """

    prefixes: list[str]
    requests: list[int | None]
    order: list[tuple[int, int]]
    is_blend: bool


def mix(
    words: Sequence[str],
    length_of: Callable[[str, int | None], int],
    *,
    num_samples: int | None,
    surplus: float = 0.005,
    per_split: bool = False,
) -> Mixed:
    """Return the mix that a run reads.

    Args:
        words: of --data-path; per_split: of --train-data-path and similar.
        length_of: prefix, and the samples that it is built for -> the samples that it has.
        num_samples: requested, or None. surplus: built beyond each part.
    """
    weights, prefixes = read(words)
    if len(prefixes) == 1 and (weights is None or per_split):
        length = length_of(prefixes[0], num_samples)
        return Mixed(prefixes, [num_samples], [(0, k) for k in range(length)], is_blend=False)
    if weights is None:
        return _by_length(prefixes, length_of, num_samples)
    if num_samples is None or any(not 0 < weight < float("inf") for weight in weights):
        raise Refused("a weight that is not above 0, or no number of samples")
    shares, targets, wanted = requests(weights, num_samples, surplus=surplus)
    again = [share / pairwise_sum(shares) for share in shares]  # the blend normalises the normalised weights again
    components, samples = weighted(again, sum(targets))
    for number, (prefix, request) in enumerate(zip(prefixes, wanted, strict=True)):
        length = length_of(prefix, request)
        if not length or components.count(number) > length:
            raise Refused(f"{prefix} has {length} samples")
    return Mixed(prefixes, list(wanted), list(zip(components, samples, strict=True)), is_blend=True)


def read(words: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Return the weights, or None, and the prefixes; stricter than Megatron, which treats mixtures as prefixes."""
    numbers = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(number is None for number in numbers):
        return None, [word.strip() for word in words]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise Refused("weights and prefixes are mixed")
    return known, [word.strip() for word in words[1::2]]


def _by_length(prefixes: list[str], length_of: Callable[[str, int | None], int], num_samples: int | None) -> Mixed:
    lengths = [length_of(prefix, None) for prefix in prefixes]
    if not all(lengths):
        raise Refused("a corpus without samples")
    if num_samples is None:
        components, samples = exhaustive(lengths)
    else:
        total = pairwise_sum([float(length) for length in lengths])
        components, samples = weighted([length / total for length in lengths], min(num_samples, sum(lengths)))
    if any(components.count(number) > length for number, length in enumerate(lengths)):
        raise Refused("more samples than there are")
    return Mixed(prefixes, [None] * len(prefixes), list(zip(components, samples, strict=True)), is_blend=True)


def _number(word: str) -> float | None:
    try:
        return float(Fraction(word)) if "/" in word else float(word)
    except ValueError:
        return None
