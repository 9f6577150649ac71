"""Context parallelism: which tokens of a row a rank holds. Pure, no torch.

A row is divided into 2 cp chunks of equal length, and rank r holds chunks r and 2 cp - 1 - r: a token attends to all
before it, so an early chunk is cheap and a late one expensive, and each rank has one of both (as in Megatron-LM and
Llama 3, Grattafiori et al. 2024, section 3.3.2). A single rank holds chunks 0 and 1, the whole row.
"""

from __future__ import annotations


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks that one of `size` ranks holds, in the order in which it holds them."""
    return rank, 2 * size - 1 - rank


def place_of(number: int, size: int) -> int:
    """Where a chunk comes among those of all ranks, rank after rank."""
    return 2 * number if number < size else 2 * (2 * size - 1 - number) + 1


def columns_of(length: int, *, rank: int, size: int) -> list[int]:
    """The positions of the rank's tokens in a row of `length` tokens, a multiple of 2 x size."""
    chunk = length // (2 * size)
    return [place for number in chunks_of(rank, size) for place in range(number * chunk, (number + 1) * chunk)]


def chunk_ends(length: int, *, rank: int, size: int) -> tuple[int, int]:
    """Where each chunk of the rank ends in the row."""
    chunk = length // (2 * size)
    first, second = chunks_of(rank, size)
    return (first + 1) * chunk, (second + 1) * chunk
