"""A reader of bash scripts such as Megatron-LM's examples: variables, arrays, arithmetic, `if` on strings.

Nothing is run. Only assignments of the script are followed; the result is the commands as words, in order. An unknown
value (a variable that is not set, the output of a command, a file that may exist) becomes a word `<NAME>`, so that only
an argument that needs it must be refused. The body of a loop, a function or a `case` is read once, and the variables
that it assigns become unknown. Numbers have 64 bits, and the expanded text of a script at most MOST_CHARACTERS.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from trainer.migrate.lexer import ShellError, Statement, closing, split_statements

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!0-]")
_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9]{1,9}|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_LOOPS = frozenset({"for", "while", "until", "select"})
_RESERVED = frozenset(
    {"if", "elif", "else", "then", "fi", "do", "done", "esac", "{", "}", "(", ")", "!", "time", "exec"}
)
MOST_CHARACTERS = 10_000_000
_INTEGER = re.compile("-?[0-9]{1,18}")
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
_NUMBERS = MappingProxyType(
    {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt}
    | {"-le": operator.le}
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


def read_commands(text: str, arguments: Sequence[str] = (), *, work: Work | None = None) -> list[list[str]]:
    """The commands of a script as words, in order.

    Args:
        text: bash.
        arguments: the script's own, `$1` and on.
        work: the count so far; None: 0.

    Raises:
        ShellError: unsupported bash, with its line, or a limit is exceeded.
    """
    return _ShellReader(arguments, Work() if work is None else work).read(text)


def unknown(word: str) -> str | None:
    """The first `<NAME>` in a word, if any: an unknown value."""
    match = re.search(r"<[^<>]+>", word)
    return match.group() if match else None


class _Block(NamedTuple):
    """A part of the script that may or may not run.

    Args:
        taken: whether it runs; before: whether an earlier branch did. None: unknown.
        end: the word that ends it; "": one command.
        arguments: the script's, restored at the end of a function's body.
    """

    taken: bool | None
    before: bool | None
    end: str
    arguments: list[str] | None = None


class _ShellReader:
    """The variables so far, and the commands."""

    def __init__(self, arguments: Sequence[str], work: Work) -> None:
        self._arguments, self._work = list(arguments), work
        self._values: dict[str, list[str]] = {"PWD": ["."]}
        self._commands: list[list[str]] = []
        self._blocks: list[_Block] = []
        self._in_head = False  # of a function: its body follows

    def read(self, text: str) -> list[list[str]]:
        self._work.add(len(text))
        statements = split_statements(text)
        at = 0
        while at < len(statements):
            at = self._statement(statements, at)
        if self._blocks:
            end = self._blocks[-1].end
            raise ShellError(f"{'an `if`' if end == 'fi' else 'a block'} without its `{end}`")
        return self._commands

    def _statement(self, statements: list[Statement], at: int) -> int:
        """Follow one statement (or the head of an `if`); returns the position of the next."""
        words, line = list(statements[at].words), statements[at].line
        if self._blocks and self._blocks[-1].end == "esac" and ")" in words:
            words = words[words.index(")") + 1 :]  # after the pattern
        while words and (words[0] in _RESERVED or words[0] in _LOOPS or words[0] == "case" or _is_function(words)):
            first = words[0]
            if first in ("if", "elif"):
                return self._condition(statements, at, first)
            rest = self._opened(words, statements[at : at + 2])
            words = words[1:] if rest is None else rest
            self._branch(first, line)
        taken = self._taken()
        words = words[:-1] if words[-1:] == [")"] else words
        if words and words[0] not in ("[", "[[") and taken is not False:
            self._simple(words, sure=taken is True)
        after = statements[at].after
        if after in ("&&", "||") and at + 1 < len(statements):
            return self._chained(statements, at, words)
        return at + 1

    def _chained(self, statements: list[Statement], at: int, words: list[str]) -> int:
        """A command after `&&` or `||`: followed if the test before it says so; commands are assumed to succeed."""
        is_test = bool(words) and words[0] in ("[", "[[")
        done = self._truth(words) if is_test else True
        if statements[at].after == "||" and done is not None:
            done = not done
        depth = len(self._blocks)
        self._blocks.append(_Block(done, None, ""))
        following = self._statement(statements, at + 1)
        inside = [block._replace(taken=_both(done, block.taken)) for block in self._blocks[depth + 1 :]]
        self._blocks[depth:] = inside  # of a group, or another block that begins here
        return following

    def _opened(self, words: list[str], lines: list[Statement]) -> list[str] | None:
        """The words after the head of a loop, a `case` or a function, if one begins here; else None.

        Args:
            lines: the statement of these words, and the next one.
        """
        first, rest = words[0], words[1:]
        if first in _LOOPS:
            alone = lines[0].after in (";", "\n") and lines[-1].words[0] == "do"  # not joined by && or ||
            truth = self._truth(rest) if alone and first in ("while", "until") else None
            never = truth is (first == "until")  # a loop over the script's arguments, and there are none
            self._blocks.append(_Block(False if never else None, None, "done"))
            if first in ("for", "select"):
                self._forget(rest[:1])
                return []
            return rest
        if first == "case":
            self._blocks.append(_Block(None, None, "esac"))
            return words[words.index(")") + 1 :] if ")" in words else []
        if _is_function(words):
            self._in_head = True
            return [word for word in rest[first == "function" :] if word not in ("(", ")")]
        if first == "{":
            body = self._in_head
            self._blocks.append(_Block(None if body else True, None, "}", self._arguments if body else None))
            if body:
                self._arguments, self._in_head = ["<arguments>"], False
        return None

    def _forget(self, names: Sequence[str]) -> None:
        """Set these variables to an unknown value."""
        self._values.update({name: [f"<{name}>"] for name in names if re.fullmatch(r"[A-Za-z_]\w*", name)})

    def _condition(self, statements: list[Statement], at: int, first: str) -> int:
        words = list(statements[at].words)
        tokens = words[words.index(first) + 1 :]
        while at + 1 < len(statements) and statements[at + 1].words[0] != "then":
            tokens += [statements[at].after, *statements[at + 1].words]
            at += 1
        if first == "if":
            self._blocks.append(_Block(self._truth(tokens), False, "fi"))
            return at + 1
        if not self._blocks or self._blocks[-1].end != "fi":
            raise ShellError(f"line {statements[at].line}: `elif` without its `if`")
        before = _either(self._blocks[-1].taken, self._blocks[-1].before)
        truth = self._truth(tokens)
        self._blocks[-1] = _Block(_both(_opposite(before), truth), before, "fi")
        return at + 1

    def _branch(self, word: str, line: int) -> None:
        end = self._blocks[-1].end if self._blocks else None
        if word in ("else", "fi") and end != "fi":
            raise ShellError(f"line {line}: `{word}` without its `if`")
        if word in ("done", "esac") and end != word:
            raise ShellError(f"line {line}: `{word}` without its {'loop' if word == 'done' else '`case`'}")
        if word == "else":
            taken, before, *_ = self._blocks[-1]
            self._blocks[-1] = _Block(_opposite(_either(taken, before)), before, "fi")
        elif word == end:
            arguments = self._blocks.pop().arguments
            self._arguments = self._arguments if arguments is None else arguments

    def _taken(self) -> bool | None:
        result: bool | None = True
        for block in self._blocks:
            result = _both(result, block.taken)
        return result

    def _simple(self, raw: list[str], *, sure: bool) -> None:
        """Assignments and commands; if it is uncertain that they run, an assigned value becomes unknown."""
        start = 1 if raw[0] in _DECLARES else 0
        assigned = 0
        for word in raw[start:]:
            match = _ASSIGNMENT.fullmatch(word)
            if not match:
                if start:  # export NAME, declare -a NAME
                    continue
                break
            self._assign(match, sure=sure)
            assigned += 1
        if start or assigned == len(raw):
            return
        words = [field for word in raw[assigned:] for field in self.expand(word)]
        if words[:1] == ["shift"]:
            self._shift("".join(words[1:2]) or "1", sure=sure)
        elif words[:1] and words[0] in ("read", "mapfile", "readarray"):
            self._forget(words[1:])
        elif words[:1] == ["eval"]:
            self._commands += _ShellReader(self._arguments, self._work).read(" ".join(words[1:]))
        elif words:
            self._commands.append(words)

    def _shift(self, count: str, *, sure: bool) -> None:
        if sure and _INTEGER.fullmatch(count):
            del self._arguments[: max(int(count), 0)]
        elif self._arguments:
            self._arguments = ["<arguments>"]

    def _assign(self, match: re.Match[str], *, sure: bool) -> None:
        name, plus, raw = match.groups()
        self._work.add(sum(map(len, self._values.get(name, []))) // 64 + 1)  # which are copied
        if not sure:
            self._forget([name])
        elif raw.startswith("("):
            statements = split_statements(raw[1:-1])
            new = [field for statement in statements for word in statement.words for field in self.expand(word)]
            self._values[name] = [*self._values.get(name, []), *new] if plus else new
        else:
            text = " ".join(self.expand(f'"{raw}"' if raw[:1] not in ("'", '"') else raw))
            self._values[name] = ["".join(self._values.get(name, [])) + text] if plus else [text]

    def expand(self, raw: str) -> list[str]:
        """The fields of a raw word: quotes removed, variables expanded, split at blanks as in bash."""
        fields: list[str] = []
        current: str | None = None
        for values, quoted in self._parts(raw, quoted=False):
            self._work.add(sum(map(len, values)) + len(values))
            pieces = list(values) if quoted else [piece for value in values for piece in _split(value)]
            if quoted and not pieces:
                continue
            for number, piece in enumerate(pieces):
                if number and current is not None:
                    fields.append(current)
                    current = None
                if piece or quoted or current is not None:
                    current = (current or "") + piece
        return [*fields, current] if current is not None else fields

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
            elif mark == "`" or raw.startswith("$(", at):
                yield self._substituted(raw, at)
                at = closing(raw, at + (mark == "$"))
            elif mark == "$" and (expression_and_end := _reference(raw, at)):
                inside_braces, at = expression_and_end
                values = self._value(inside_braces)
                listed = inside_braces in ("@", "*") or "[" in inside_braces
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
            names = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(self._value(name.group())), text)
            if (value := _calculated(names)) is not None:
                return [str(value)], True
        if inside.strip("$()` ") == "pwd":
            return ["."], True
        return ["<output_of_" + re.sub(r"\W+", "_", inside.strip("$()`"))[:24] + ">"], True

    def _value(self, reference: str) -> list[str]:
        """The value of an expression in braces: NAME, NAME[@], NAME:-default, @, 1."""
        match = _BRACES.fullmatch(reference)
        if not match:
            return (
                [str(len(self._arguments))]
                if reference == "#" and self._arguments != ["<arguments>"]
                else [f"<{re.sub(r'[^A-Za-z_0-9]', '_', reference)}>"]
            )
        name, _, default_mark, default = match.groups()
        if name in ("@", "*"):
            return self._arguments
        if name.isdigit():
            values = self._arguments[int(name) - 1 : int(name)] if int(name) else ["<script>"]
        else:
            values = self._values.get(name, [])
        if default_mark and (name not in self._values or ":" in default_mark) and not "".join(values):
            return [" ".join(self.expand(f'"{default}"' if default[:1] not in ("'", '"') else default))]
        if not values and name not in self._values:
            return [f"<argument_{name}>" if name.isdigit() else f"<{name}>"]
        return values

    def _truth(self, tokens: Sequence[str]) -> bool | None:
        """A condition of tests on strings and numbers, joined by && and ||; None: unknown."""
        result: bool | None = None
        joint, atom = "", []  # type: str, list[str]
        for token in [*tokens, ";"]:
            if token in ("[", "[[", "]", "]]", "\n"):
                continue
            if token not in ("&&", "||", ";"):
                atom.append(token)
                continue
            if atom or token != ";":
                value = self._test(atom)
                result = value if not joint else (_both if joint == "&&" else _either)(result, value)
                joint, atom = token, []
        return result

    def _test(self, raw: list[str]) -> bool | None:
        if raw[:1] == ["!"]:
            return _opposite(self._test(raw[1:]))
        words = [" ".join(self.expand(word)) for word in raw]
        are_known = not any(unknown(word) for word in words)
        if len(words) == 2 and words[0] in ("-z", "-n"):
            # A variable that is not set counts as empty here: scripts test for that.
            name = re.fullmatch(r"<(\w+)>", words[1])
            if name and (name[1] in self._values or name[1].startswith("output_of_")):
                return None  # set, but to an unknown value
            empty = not words[1] or bool(name)
            return empty == (words[0] == "-z")
        if len(words) != 3 or not are_known:
            return None
        left, how, right = words
        if how in ("=", "==", "!=") and re.search(r"[*?[]", right):
            return None  # a pattern
        if how in ("=", "==", "!="):
            return (left == right) == (how != "!=")
        if how in _NUMBERS and _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right):
            return bool(_NUMBERS[how](int(left), int(right)))
        return None


def _is_function(words: Sequence[str]) -> bool:
    """Whether these words define a function: `function f` or `f()`."""
    return words[0] == "function" or (words[0][:-1].isidentifier() and words[0].endswith("(") and words[1:2] == [")"])


def _reference(raw: str, at: int) -> tuple[str, int] | None:
    """(referenced name, position after it) for the dollar sign here."""
    if raw.startswith("${", at):
        end = closing(raw, at + 1)
        return raw[at + 2 : end - 1], end
    name = _NAME.match(raw, at + 1)
    return (name.group(), name.end()) if name else None


def _split(value: str) -> list[str]:
    """Fields of an unquoted value; an empty one at an end means that the neighbour does not join."""
    parts = re.split(r"\s+", value)
    return parts if value else [""]


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


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    return _opposite(_both(_opposite(left), _opposite(right)))


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value
