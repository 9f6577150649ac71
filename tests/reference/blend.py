"""Twin of mdata_cpp/blend.hpp: the Huffman tree over integer weights that assigns samples to components.

A tree is a leaf (weight, number) or a node (weight, number, left, right). Leaves are numbered by component, nodes in
the order of creation; the two lightest are joined, the lower number first among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Tree = tuple[Any, ...]


def build(weights: Sequence[int]) -> Tree:
    """Return the root of the tree over one or more positive weights."""
    trees: list[Tree] = [(weight, number) for number, weight in enumerate(weights)]
    for number in range(len(weights), 2 * len(weights) - 1):
        trees.sort(key=lambda tree: tree[:2])
        left, right, *trees = trees
        trees.append((left[0] + right[0], number, left, right))
    return trees[0]


def on_the_left(tree: Tree, n: int) -> int:
    """How many of a node's first n samples its left child gives: n w / W, rounded to the nearest."""
    weight, left_weight = tree[0], tree[2][0]
    return int((2 * n * left_weight + weight) // (2 * weight))


def locate(tree: Tree, k: int) -> tuple[int, int]:
    """Return (component, sample inside it) of the blend's sample k."""
    if len(tree) == 2:
        return tree[1], k
    before = on_the_left(tree, k)
    goes_left = on_the_left(tree, k + 1) > before
    return locate(tree[2], before) if goes_left else locate(tree[3], k - before)


def counts(tree: Tree, k: int) -> dict[int, int]:
    """Return how many of the first k samples each component gives."""
    if len(tree) == 2:
        return {tree[1]: k}
    left = on_the_left(tree, k)
    return counts(tree[2], left) | counts(tree[3], k - left)
