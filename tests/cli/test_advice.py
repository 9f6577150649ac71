"""The options that messages name: each is one of the command that says it; see tests/helpers/advice.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.advice import COMMANDS, foreign_options, options_in, options_of

FOREIGN = (
    ("body.jsonl:1: no key\n  try: another key (--json-key); or another (--tokens-column)", ["--tokens-column"]),
    ("wrong\n  try: mdata preprocess --tokens-column, or --where", []),
    ("wrong\n  try: mdata preprocess --where, or mdata clean --tokens-column", []),
    ("wrong\n  try: mdata inspect --tokens-column", ["--tokens-column"]),
    ("mdata preprocess is another line\n  try: --tokens-column", ["--tokens-column"]),
    ("--given: not a number\n  try: torchrun --nproc-per-node 2", []),
)


@pytest.mark.parametrize(("message", "foreign"), FOREIGN)
def test_an_option_of_another_command_is_found(message, foreign):
    assert foreign_options(message, "mdata", ["clean", "--given=x"]) == foreign


def text_of(node: ast.AST) -> str | None:
    """A text with {} for what is filled in; None: not a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return f"{text_of(node.left) or '{}'}{text_of(node.right) or '{}'}"
    return None


def texts_in(node: ast.AST) -> Iterator[str]:
    text = text_of(node)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what errors advise: arguments and variables called `fix` or `expected`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword):
            names, value = [node.arg], node.value
        elif isinstance(node, ast.Assign):
            names, value = [target.id for target in node.targets if isinstance(target, ast.Name)], node.value
        else:
            continue
        if {"fix", "expected"}.intersection(names):
            yield from ((value.lineno, text) for text in texts_in(value))


def test_every_option_that_an_error_advises_exists():
    """Also where no test causes the error: an option of the command named before it, or of any."""
    known = frozenset[str]().union(*(options_of(program, c.name) for program in COMMANDS for c in COMMANDS[program]))
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {option} in {text!r}"
        for package in ("mdata", "trainer", "cli")
        for path in (ROOT / package).rglob("*.py")
        if "migrate" not in path.parts and path.name != "mtrain_config.py"  # arguments of Megatron-LM
        for line, text in messages(path)
        for option, named in options_in(text)
        if named is False or (named is None and option not in known)
    ]
    assert not wrong, "\n".join(wrong)
