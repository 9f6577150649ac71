"""At every error of a command that a test calls: see that its advice can be followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cli import console
from tests.helpers.advice import foreign_options


@pytest.fixture(autouse=True)
def advice_is_checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test whose command advises options that it does not have."""
    lines: list[Sequence[str]] = []
    wrong: list[str] = []
    dispatch, report = console.dispatch, console._report

    def noted(*arguments: Any) -> int:
        lines.append(arguments[-1])
        return dispatch(*arguments)

    def checked(error: BaseException, by: console.Console, *, debug: bool) -> int:
        if lines and lines[-1] and isinstance(error, console.MdataError):
            options = foreign_options(str(error), by.program, lines[-1])
            wrong.extend(f"{by.program} {lines[-1][0]} has no {option}, in: {error}" for option in options)
        return report(error, by, debug=debug)

    monkeypatch.setattr(console, "dispatch", noted)
    monkeypatch.setattr(console, "_report", checked)
    yield
    assert not wrong, "\n".join(wrong)
