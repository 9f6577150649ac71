"""Expands the words of a bash script: quotes, variables, arithmetic. Nothing is run.

A value that the script alone does not decide (a variable that is not set, the output of a command, a pattern) becomes a
word `<NAME>`. Numbers have 64 bits, and the expanded text of a script at most MOST_CHARACTERS.
"""

from __future__ import annotations

import abc
import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from trainer.migrate.lexer import ShellError, closing

VARIABLE = re.compile(r"[A-Za-z_]\w*")
TILDE = re.compile("^~(?=/|$)")
INTEGER = re.compile("-?(?:0|[1-9][0-9]{0,17})")  # 010 is 8 in some places
MOST_CHARACTERS = 10_000_000
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!0-]")
_CHANGES = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")  # a variable, in arithmetic
_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9]{1,9}|[@*])(\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_ALTERNATIVES = re.compile(r"\{[^{}\s'\"$]*(?:,|\.\.)[^{}\s'\"]*\}")  # a{b,c}, {1..3}
_MOST_NUMBER = 2**63 - 1
_MOST_ARITHMETIC = 1000  # characters of an expression
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: lambda left, right: _divided(left, right)[0],
        ast.Mod: lambda left, right: _divided(left, right)[1],
    }
)


class Work:
    """Counts the characters that a script expands to, so that a few lines cannot fill memory."""

    def __init__(self) -> None:
        self._characters = 0

    def add(self, characters: int) -> None:
        """Count some more.

        Raises:
            ShellError: more than MOST_CHARACTERS.
        """
        self._characters += characters
        if self._characters > MOST_CHARACTERS:
            raise ShellError(f"its variables grow beyond the limit of {MOST_CHARACTERS:,} characters in all")


def unknown(word: str) -> str | None:
    """The first `<NAME>` in a word, if any: an unknown value."""
    match = re.search(r"<[^<>]+>", word)
    return match.group() if match else None


class WordExpander(abc.ABC):
    """The variables and arguments of a script, and the expansion of words with them.

    Args:
        arguments: the script's own, `$1` and on. work: the count so far.
    """

    def __init__(self, arguments: Sequence[str], work: Work) -> None:
        self.arguments, self.work = list(arguments), work
        self.values: dict[str, list[str]] = {"PWD": ["."]}

    @abc.abstractmethod
    def assign(self, name: str, values: list[str]) -> None:
        """Set a variable, as `${NAME:=default}` does."""

    @abc.abstractmethod
    def forget(self, names: Iterable[str]) -> None:
        """Set variables to an unknown value, as arithmetic that changes them does."""

    def expand(self, raw: str) -> list[str]:
        """The fields of a raw word: quotes removed, variables expanded, split at blanks as in bash."""
        fields: list[str] = []
        current: str | None = None
        for values, quoted in self._parts(TILDE.sub("$HOME", raw), quoted=False):
            self.work.add(sum(map(len, values)) + len(values))
            pieces = list(values) if quoted else [piece for value in values for piece in self._split(value)]
            if quoted and not pieces:
                continue
            for number, piece in enumerate(pieces):
                if number and current is not None:
                    fields.append(current)
                    current = None
                if piece or quoted or current is not None:
                    current = (current or "") + piece
        return [*fields, current] if current is not None else fields

    def _split(self, value: str) -> list[str]:
        """Fields of an unquoted value; an empty one at an end means that the neighbour does not join."""
        if "IFS" in self.values and not set(value).isdisjoint("".join(self.values["IFS"]) + " \t\n"):
            return [unknown_word(value)]
        return re.split(r"\s+", value)

    def _parts(self, raw: str, *, quoted: bool) -> Iterator[tuple[list[str], bool]]:
        """(values, whether they stay unsplit) of each part of a raw word."""
        at = 0
        while at < len(raw):
            mark = raw[at]
            if mark == "\\" and at + 1 < len(raw):
                keeps = quoted and raw[at + 1] not in '$`"\\\n'
                yield [("\\" if keeps else "") + raw[at + 1].replace("\n", "")], True
                at += 2
            elif mark == "'" and not quoted:
                end = closing(raw, at)
                yield [raw[at + 1 : end - 1]], True
                at = end
            elif mark == '"':
                end = closing(raw, at)
                inside = list(self._parts(raw[at + 1 : end - 1], quoted=True))
                yield from inside or [([""], True)]
                at = end
            elif raw.startswith('$"', at) and not quoted:
                at += 1
            elif raw.startswith("$'", at) and not quoted:
                end = closing(raw, at + 1)
                text = raw[at + 2 : end - 1]
                yield [unknown_word(text) if "\\" in text else text], True
                at = end
            elif raw.startswith("$[", at):
                end = (raw.find("]", at) + 1) or len(raw)
                yield [unknown_word(raw[at:end])], True
                at = end
            elif not quoted and (alternatives := _ALTERNATIVES.match(raw, at)):
                yield [unknown_word(alternatives.group())], True
                at = alternatives.end()
            elif mark == "`" or raw.startswith("$(", at):
                yield self._substituted(raw, at)
                at = closing(raw, at + (mark == "$"))
            elif mark == "$" and (expression_and_end := _reference(raw, at)):
                inside_braces, at = expression_and_end
                values = self._value(inside_braces)
                listed = inside_braces == "@" or "[@]" in inside_braces
                unsplit = quoted or inside_braces[-1:] in ("'", '"')  # ${NAME:-"a b"}
                yield (values, True) if quoted and listed else ([" ".join(values)], unsplit)
            elif placeholder := re.match(r"<[^<>\n]*>", raw[at:]):
                yield [re.sub(r"\s+", "_", placeholder.group())], True
                at += placeholder.end()
            else:
                yield [mark], True
                at += 1

    def _substituted(self, raw: str, at: int) -> tuple[list[str], bool]:
        """The value of arithmetic; the output of a command is unknown."""
        end = closing(raw, at + (raw[at] == "$"))
        inside = raw[at:end]
        if inside.startswith("$((") and inside.endswith("))"):
            text = " ".join(self.expand('"' + inside[3:-2].replace('"', "") + '"'))
            if _CHANGES.search(inside):
                self.forget(VARIABLE.findall(inside))
                return [unknown_word(inside.strip("$()"))], True
            names = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(self._value(name.group())), text)
            if (value := _calculated(names)) is not None:
                return [str(value)], True
        if inside.strip("$()` ") == "pwd":
            return ["."], True
        return [unknown_word(inside.strip("$()`"))], True

    def _value(self, reference: str) -> list[str]:
        """The value of an expression in braces: NAME, NAME[@], NAME:-default, @, 1."""
        match = _BRACES.fullmatch(reference)
        if not match:
            counted = reference == "#" and self.arguments != ["<arguments>"]
            return [str(len(self.arguments)) if counted else unknown_word(reference)]
        name, listed, default_mark, default = match.groups()
        if name in ("@", "*"):
            return self.arguments
        if name.isdigit():
            values = self.arguments[int(name) - 1 : int(name)] if int(name) else ["<script>"]
            if not values and self.arguments == ["<arguments>"]:
                values = [f"<argument_{name}>"]
            is_set = bool(values)
        else:
            values = self.values.get(name, [])
            values = values if listed else values[:1]  # the first of an array
            is_set = name in self.values
        if default_mark:
            is_empty = not is_set or (":" in default_mark and not "".join(values))
            if default_mark.endswith("+") and any(map(unknown, values)):
                return [f"<{name}>"]
            if is_empty != default_mark.endswith("+"):
                word = " ".join(self.expand(f'"{default}"' if default[:1] not in ("'", '"') else default))
                if default_mark.endswith("="):
                    self.assign(name, [word])
                return [word]
            if is_empty:
                return [""]
        if not is_set:
            return [f"<argument_{name}>" if name.isdigit() else f"<{name}>"]
        return values


def unknown_word(text: str) -> str:
    """The placeholder for the output of a command or an expression."""
    return "<output_of_" + re.sub(r"\W+", "_", text)[:24] + ">"


def _reference(raw: str, at: int) -> tuple[str, int] | None:
    """(referenced name, position after it) for the dollar sign here."""
    if raw.startswith("${", at):
        end = closing(raw, at + 1)
        return raw[at + 2 : end - 1], end
    name = _NAME.match(raw, at + 1)
    return (name.group(), name.end()) if name else None


def _calculated(text: str) -> int | None:
    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            result = _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
            if abs(result) > _MOST_NUMBER:
                raise ShellError(f"its arithmetic goes beyond the limit of {_MOST_NUMBER}")
            return result
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError(text)

    if re.search(r"#|\d_", text):  # 16#ff
        return None
    if len(text) > _MOST_ARITHMETIC:
        raise ShellError(f"arithmetic of {len(text)} characters, beyond the limit of {_MOST_ARITHMETIC}")
    try:
        return value(ast.parse(text.strip(), mode="eval"))
    except ShellError:
        raise
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None


def _divided(left: int, right: int) -> tuple[int, int]:
    """(quotient, remainder) as in bash: rounded towards 0."""
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return quotient, left - quotient * right
