"""Random texts and requests that cover edge cases: lengths of documents, splits, sample counts, options of rows.

Everything is drawn from one `random.Random`, so a number identifies a configuration. `edges` lists its edge cases, so
that a test can check that all of them occurred.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np

from mdata import UsageError
from mdata.samples.rows import RowOptions

EOD = 2
LENGTHS = (1, 1, 2, 3, 4, 5, 8, 12)


@dataclass(frozen=True)
class Layout:
    """Sequences of a file, of which [first, stop) are the split.

    Attributes:
        lengths: tokens of each sequence. documents: the same, those of each document in a list.
        length: tokens of a sample, S. extra: 1 where it reads one more.
        tokens: of the split.
        edges: what is special.
    """

    lengths: list[int]
    documents: list[list[int]]
    first: int
    stop: int
    length: int
    extra: int
    tokens: int
    edges: frozenset[str]

    @property
    def per_epoch(self) -> int:
        """Whole samples that the split has in Megatron's order."""
        return max(0, self.tokens - self.extra) // self.length


class Refused:
    """A block that is to end in UsageError if `wrong`, else without."""

    def __init__(self, wrong: bool) -> None:
        self._wrong = wrong

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, *_: object) -> bool:
        if self._wrong:
            assert kind is UsageError, f"refused: {kind}"
            return True
        return False


def totals(random: Random, *, length: int, extra: int) -> dict[str, int]:
    """Numbers of tokens of a split, by what is special about them."""
    many = random.randint(3, 7)
    one, two = length + extra, 2 * length + extra
    return {
        "no token": 0,
        "one token": 1,
        "S + x - 1": one - 1,
        "S + x": one,
        "S + x + 1": one + 1,
        "2 S + x - 1": two - 1,
        "2 S + x": two,
        "2 S + x + 1": two + 1,
        "exact fit": many * length + extra,
        "one more than an exact fit": many * length + extra + 1,
        "one less than an exact fit": many * length + extra - 1,
        "any": random.randint(0, 60),
    }


def parted(random: Random, tokens: int) -> list[int]:
    """A number of tokens as the lengths of sequences, some of them empty."""
    cuts = sorted(random.randint(0, tokens) for _ in range(random.choice((0, 0, 1, 2, 4, 8))))
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]
    empty = [0] * random.choice((0, 0, 0, 1, 2))
    return random.choice((empty + lengths, lengths + empty))


def grouped(random: Random, lengths: list[int]) -> list[list[int]]:
    """Sequences in documents, some of which have none."""
    if random.random() < 0.5:
        return [[length] for length in lengths]
    documents: list[list[int]] = [[]]
    for length in lengths:
        documents[-1].append(length)
        while random.random() < 0.4:
            documents.append([])
    return documents


def draw_layout(random: Random) -> Layout:
    """A split whose number of tokens is on an edge more often than not, between other sequences."""
    length, extra = random.choice(LENGTHS), random.randint(0, 1)
    name, tokens = random.choice(list(totals(random, length=length, extra=extra).items()))
    inside = parted(random, tokens)
    around = [parted(random, random.randint(0, 9)) if random.random() < 0.4 else [] for _ in range(2)]
    edges = {name}
    edges |= {"empty first"} if inside[0] == 0 < tokens else set()
    edges |= {"empty last"} if inside[-1] == 0 < tokens else set()
    edges |= {"empty between"} if 0 in inside[1:-1] else set()
    edges |= {"one sequence"} if len(inside) == 1 else set()
    edges |= {"part of a file"} if any(around) else {"whole file"}
    lengths = [*around[0], *inside, *around[1]]
    first = len(around[0])
    stop = first + len(inside)
    documents = grouped(random, lengths)
    return Layout(lengths, documents, first, stop, length, extra, tokens, frozenset(edges))


def draw_wanted(random: Random, layout: Layout) -> tuple[int | None, set[str]]:
    """How many samples are asked for in Megatron's order: around whole epochs, and around the 80 % of the last one."""
    per, epochs = layout.per_epoch, random.randint(1, 4)
    share = (epochs * per) + int(0.8 * per)
    name, wanted = random.choice(
        [
            ("one epoch", None),
            ("no sample", 0),
            ("one sample", 1),
            ("whole epochs", epochs * per),
            ("one more than whole epochs", epochs * per + 1),
            ("one less than whole epochs", max(0, epochs * per - 1)),
            ("80 % of the last epoch", share),
            ("more than 80 % of the last epoch", share + 1),
            ("less than 80 % of the last epoch", max(0, share - 1)),
            ("any number", random.randint(0, 40)),
        ]
    )
    return wanted, {name}


def draw_options(random: Random, layout: Layout, *, megatron: bool) -> RowOptions:
    """What is told of rows."""
    masks = random.random() < 0.5
    return RowOptions(
        sequence_length=layout.length,
        document_masks=masks,
        position_ids=megatron or random.random() < 0.5,
        mask_eod=random.random() < 0.3,
        reset_position_ids=not masks and random.random() < 0.4,
        eod=EOD,
        pad=random.choice((-1, -1, 0, 1, EOD)) if megatron else None,
    )


def draw_tokens(random: Random, layout: Layout) -> list[int]:
    """Places, which say where a token was read, or few ids, which are the eod and the padding now and then."""
    total = sum(layout.lengths)
    if random.random() < 0.5:
        return list(range(total))
    return [random.randint(0, 4) for _ in range(total)]


def draw_seed(random: Random) -> int:
    """A seed, now and then at an end of its range."""
    return random.choice((0, 1, 2**32 - 1, random.getrandbits(32)))


def draw_documents(random: Random) -> list[list[int]]:
    """Sizes of sentences: documents without any, of one, with a sentence of about 512 tokens, one that can be used."""
    size = random.choice((5, 25))
    documents = []
    for _ in range(random.randint(1, 7)):
        sizes = [
            random.choice((0, random.randint(0, size), random.randint(1, size))) for _ in range(random.randint(0, 6))
        ]
        if sizes and random.random() < 0.1:
            sizes[random.randrange(len(sizes))] = random.choice((511, 512, 513))
        documents.append(sizes)
    return documents


def document_tokens(documents: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """The text of each document."""
    ends = np.cumsum([0, *map(sum, documents)]).tolist()
    return [tokens[start:stop] for start, stop in pairwise(ends)]
