"""Splits bash text into simple commands of raw words; nothing is expanded and nothing is run.

A raw word keeps its quotes and its dollar signs; `NAME=( ... )` is one raw word, newlines included. Comments and
redirections, here-documents included, are left out. A placeholder as in Megatron-LM's examples, `<Specify path>`, is
part of its word. Text that cannot be split (an open quote, a here-document without an end) is a ShellError with its
line.
"""

from __future__ import annotations

import dataclasses
import re

_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|&;]*>")
_REDIRECTION = re.compile(r"\d*(>>|>&|>\||>|<)[ \t]*(?:&?[0-9-]+)?")
_HERE = re.compile(r"\d*<<(-?)[ \t]*")
_OPERATOR = re.compile(r"&&|\|\||\||;;&|;;|;&|;|&|\n")
CASE_ENDS = (";;", ";&", ";;&")  # what ends a branch of a `case`: statements of their own
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_CLOSING = {"'": "'", '"': '"', "`": "`", "(": ")", "{": "}"}


class ShellError(ValueError):
    """Bash that this reader does not support; the message has line and reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """A simple command: its raw words, its line from 1, and the operator after it."""

    words: tuple[str, ...]
    line: int
    after: str


def split_statements(text: str) -> list[Statement]:
    """The simple commands of a script, in order.

    Raises:
        ShellError: an open quote or bracket, or a here-document without an end.
    """
    statements: list[Statement] = []
    words: list[str] = []
    documents: list[tuple[str, bool]] = []  # here-documents of this line: its end, after tabs or not
    at, line, begun = 0, 1, 1
    while at < len(text):
        if text[at] in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text[at] == "#":
            at = (text.find("\n", at) + 1 or len(text) + 1) - 1
        elif text.startswith("<<<", at):
            at = _word_end(text, _after_blanks(text, at + 3), line)
        elif here := _HERE.match(text, at):
            end = _word_end(text, here.end(), line)
            documents.append((re.sub(r"[\\\"']", "", text[here.end() : end]), bool(here[1])))
            at = end
        elif (redirection := _REDIRECTION.match(text, at)) and not _PLACEHOLDER.match(text, at):
            at = redirection.end()
            if redirection.group().rstrip()[-1] in "<>|":
                at = _word_end(text, at, line)
        elif operator := _OPERATOR.match(text, at):
            if words:
                after = ";" if operator.group() in CASE_ENDS else operator.group()
                statements.append(Statement(tuple(words), begun, after))
            if operator.group() in CASE_ENDS:  # also where it stands on a line of its own
                statements.append(Statement((operator.group(),), line, "\n"))
            at, words, line = operator.end(), [], line + (operator.group() == "\n")
            if operator.group() == "\n" and documents:
                at, line = _after_documents(text, at, line, documents)
                documents = []
        else:
            begun = begun if words else line
            end = _word_end(text, at, line)
            words.append(text[at:end])
            line += text.count("\n", at, end)
            at = end
    return [*statements, Statement(tuple(words), begun, "\n")] if words else statements


def _after_blanks(text: str, at: int) -> int:
    """The position of the next character that is not a blank."""
    while text[at : at + 1] in (" ", "\t") and at < len(text):
        at += 1
    return at


def _after_documents(text: str, at: int, line: int, documents: list[tuple[str, bool]]) -> tuple[int, int]:
    """(position, line) after the here-documents that begin here."""
    for mark, after_tabs in documents:
        first = line
        while True:
            if at >= len(text):
                raise ShellError(f"line {first - 1}: the here-document has no line {mark}")
            end = text.find("\n", at) % (len(text) + 1)
            text_line, at, line = text[at:end], min(end + 1, len(text)), line + 1
            if (text_line.lstrip("\t") if after_tabs else text_line) == mark:
                break
    return at, line


def _word_end(text: str, at: int, line: int) -> int:
    """The end of the raw word that begins here."""
    start = at
    while at < len(text):
        mark = text[at]
        if mark == "\\":
            at += 2
        elif mark in "'\"`":
            at = closing(text, at, line=line)
        elif mark == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = closing(text, at + 1, line=line)
        elif mark == "(" and _ARRAY.search(text, start, at):
            at = closing(text, at, line=line)
        elif mark == "(" and at == start:
            return at + 1
        elif placeholder := _PLACEHOLDER.match(text, at):
            at = placeholder.end()
        elif mark in " \t\r\n;&|<>" or (mark == ")" and at > start):
            return at
        else:
            at += 1
    return min(at, len(text))


def closing(text: str, at: int, *, line: int = 0) -> int:
    """The position after the bracket or quote that closes the one here.

    Raises:
        ShellError: nothing closes it.
    """
    opened, close = text[at], _CLOSING[text[at]]
    end = at + 1
    while end < len(text):
        mark = text[end]
        if mark == close:
            return end + 1
        if mark == "\\" and opened != "'":
            end += 2
        elif opened != "'" and mark == "$" and text[end + 1 : end + 2] in ("(", "{"):
            end = closing(text, end + 1, line=line)
        elif opened in "({" and mark in "'\"`(":
            end = closing(text, end, line=line)
        elif opened == "(" and mark == "#" and text[end - 1] in " \t\n(":
            end = text.find("\n", end) % (len(text) + 1)
        else:
            end += 1
    raise ShellError(f"line {line + text.count(chr(10), 0, at) * (line == 0)}: {opened} is never closed")
