"""The frame of the programs that compare an oracle's folder with this project, `python -m tests.oracles.NAME FOLDER`.

A line for each kind, then `N of M cases equal`; the exit code is 0 only if all are, and there are some. Kinds of a
later part are listed as waiting and are not in M. `--kind NAME` compares one.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mdata import MdataError

# What reading a file of another form raises.
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, RecursionError)
MOST_TOLD = 5  # cases of a kind whose difference is printed


class Case(NamedTuple):
    """One comparison: gives what differs, "" if nothing does."""

    kind: str
    name: str
    compare: Callable[[], str]
    waiting: int = 0  # the part that will have it
    note: str = ""  # of a case that differs from the others of its kind; equal cases are counted by it


def unknown(kind: str) -> str:
    """The difference of a case of no kind."""
    return f"unknown kind: {kind}"


def unreadable(error: str) -> str:
    """The difference of a case that cannot be read."""
    return f"cannot be read: {error[:300]}"


def unlike(found: Tensor, wanted: Tensor, tolerance: float) -> str:
    """How a tensor differs from the oracle's; "": in no element by more than the tolerance."""
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    most = float((found - wanted).abs().max()) if found.numel() else 0.0
    return "" if most <= tolerance else f"differs by {most:.3g}"


class Program(NamedTuple):
    """What one of these programs compares.

    Args:
        name: of its module. about: its docstring. kinds: in the order in which they are printed.
        cases_of: every case of a folder; what cannot be read, and what nobody knows, is a case that fails.
        fails: further errors of a comparison.
    """

    name: str
    about: str
    kinds: Sequence[str]
    cases_of: Callable[[Path], Iterable[Case]]
    fails: tuple[type[Exception], ...] = ()

    def compare(
        self, root: Path, kinds: Sequence[str], *, say: Callable[[str], None], tell: Callable[[str], None]
    ) -> bool:
        """Compare and print; whether all are equal.

        Args:
            kinds: only these; empty: all. say: prints a line of the result. tell: prints why a case differs.
        """
        cases = [case for case in self.cases_of(root) if not kinds or case.kind in kinds]
        equal = total = 0
        noted = Counter[str]()
        for kind in sorted({case.kind for case in cases}, key=lambda kind: ((*self.kinds, kind).index(kind), kind)):
            of_kind = [case for case in cases if case.kind == kind]
            if later := [case for case in of_kind if case.waiting]:
                say(f"waiting: {kind} (part {later[0].waiting}), {len(later)} cases")
            reasons = [(case, self._reason(case)) for case in of_kind if not case.waiting]
            if not reasons:
                continue
            right = sum(not reason for _, reason in reasons)
            for case, reason in [pair for pair in reasons if pair[1]][:MOST_TOLD]:
                tell(f"  {kind}, {case.name}: {reason}")
            notes = Counter(case.note for case, reason in reasons if case.note and not reason)
            noted += notes
            also = "".join(f", {count} of them {note}" for note, count in notes.items())
            say(f"{kind}: {right} of {len(reasons)} cases equal{also}")
            equal, total = equal + right, total + len(reasons)
        for note, count in noted.items():
            say(f"{count} cases are {note}")
        say(f"{equal} of {total} cases equal")
        return equal == total and bool(cases)

    def _reason(self, case: Case) -> str:
        try:
            return case.compare()
        except MALFORMED as error:
            return unreadable(repr(error))
        except (MdataError, AssertionError, *self.fails) as error:
            return f"{type(error).__name__}: {str(error)[-600:]}"

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command; gives the exit code."""
        prog, names = f"python -m tests.oracles.{self.name}", ", ".join(self.kinds)
        parser = argparse.ArgumentParser(prog=prog, description=self.about.split("\n")[0])
        parser.add_argument("folder", type=Path)
        parser.add_argument("--kind", action="append", default=[], metavar="NAME", help=f"one of {names}")
        arguments = parser.parse_args(argv)
        torch.set_num_threads(1)
        if strange := sorted(set(arguments.kind) - set(self.kinds)):
            print(f"unknown kind {strange[0]}; the kinds are {names}", file=sys.stderr)
        if not arguments.folder.is_dir():
            print(f"there is no folder {arguments.folder}", file=sys.stderr)
        if strange or not arguments.folder.is_dir():
            print("0 of 0 cases equal")
            return 1
        say, tell = (functools.partial(print, file=to, flush=True) for to in (sys.stdout, sys.stderr))
        return 0 if self.compare(arguments.folder.resolve(), arguments.kind, say=say, tell=tell) else 1


def answers(compare: Callable[..., bool], root: Path, *kinds: str) -> tuple[bool, list[str], list[str]]:
    """For the tests of a comparison: (whether all are equal, the lines, the reasons)."""
    lines: list[str] = []
    reasons: list[str] = []
    equal = compare(root, kinds, say=lines.append, tell=reasons.append)
    return equal, lines, reasons
