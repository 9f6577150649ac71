"""Twin of mdata/sources/sections.py: every unit of every file in one list, from which each part takes its share.

A unit is (number of the file, number in the file, the byte of all inputs at which it begins).
"""

from __future__ import annotations


def units_of(sizes: list[int], starts: list[list[int]]) -> list[tuple[int, int, int]]:
    """Return all units; `starts[f]` has the bytes of file f at which its units begin."""
    units = []
    before = 0
    for number, size in enumerate(sizes):
        units += [(number, unit, before + start) for unit, start in enumerate(starts[number])]
        before += size
    return units


def part_of_units(sizes: list[int], starts: list[list[int]], *, number: int, count: int) -> list[tuple[int, int]]:
    """Return (file, unit) of each unit of part `number`, from 1, of `count`."""
    total = sum(sizes)
    ends = [total * k // count for k in range(1, count)]
    taken = []
    for file, unit, begins in units_of(sizes, starts):
        part = 1 + sum(1 for end in ends if end <= begins)
        if part == number:
            taken.append((file, unit))
    return taken
