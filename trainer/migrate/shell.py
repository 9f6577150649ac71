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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from trainer.migrate.lexer import ShellError, Statement, closing, split_statements

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[.*\]\+?=.*", re.DOTALL)  # A[1]=x
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!0-]")
_CHANGES = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")  # a variable, in arithmetic
_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9]{1,9}|[@*])(\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_TILDE = re.compile("^~(?=/|$)")
_ALTERNATIVES = re.compile(r"\{[^{}\s'\"$]*(?:,|\.\.)[^{}\s'\"]*\}")  # a{b,c}, {1..3}
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_TESTS = frozenset({"[", "[[", "test"})
# Commands that scripts ask something; others are assumed to succeed.
_QUESTIONS = frozenset({"command", "diff", "grep", "hash", "ls", "nvidia-smi", "pgrep", "type", "which"})
_ALWAYS = MappingProxyType({"true": True, ":": True, "false": False})
_LOOPS = frozenset({"for", "while", "until", "select"})
_RESERVED = frozenset(
    {"if", "elif", "else", "then", "fi", "do", "done", "esac", "{", "}", "(", ")", "!", "time", "exec"}
)
MOST_CHARACTERS = 10_000_000
_INTEGER = re.compile("-?(?:0|[1-9][0-9]{0,17})")  # 010 is 8 in some places
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
        function: the name of the function whose body it is.
        joint: of a block after && or ||: that operator, and whether what is before it succeeds.
        runs: whether what is before it lets it run.
    """

    taken: bool | None
    before: bool | None
    end: str
    arguments: list[str] | None = None
    function: str = ""
    joint: tuple[str, bool | None] | None = None
    runs: bool | None = True


def _without_prefix(raw: list[str]) -> list[str]:
    """The words of a command without `command` and `builtin`, which run what follows them."""
    while raw[0] in ("command", "builtin"):
        rest = raw[2:] if raw[1:2] == ["--"] else raw[1:]
        if not rest or rest[0].startswith("-") or _ASSIGNMENT.fullmatch(rest[0]):
            break
        raw = rest
    return raw


class _ShellReader:
    """The variables so far, and the commands."""

    def __init__(self, arguments: Sequence[str], work: Work) -> None:
        self._arguments, self._work = list(arguments), work
        self._values: dict[str, list[str]] = {"PWD": ["."]}
        self._commands: list[list[str]] = []
        self._blocks: list[_Block] = []
        self._head = ""  # the function whose body follows
        self._functions: dict[str, set[str]] = {}  # the variables that each changes
        self._subshells: list[list[str]] = []  # the variables that each has changed
        self._sure = False  # whether the command runs that is followed
        self._ended = False  # by `exit`
        self._joint: tuple[str, bool | None] | None = None  # && or || before this command, and the status so far
        self._last: bool | None = True  # the status of the last command

    def read(self, text: str) -> list[list[str]]:
        self._work.add(len(text))
        statements = split_statements(text)
        at = 0
        while at < len(statements) and not self._ended:
            at = self._statement(statements, at)
        if self._blocks:
            end = self._blocks[-1].end
            raise ShellError(f"{'an `if`' if end == 'fi' else 'a block'} without its `{end}`")
        return self._commands

    def _statement(self, statements: list[Statement], at: int) -> int:
        """Follow one statement (or the head of an `if`); returns the position of the next.

        After && or || it is followed if the status so far says so; commands are assumed to succeed.
        """
        joint, self._joint = self._joint, None
        if joint is None:
            return self._followed(statements, at)
        depth, runs = len(self._blocks), joint[1] if joint[0] == "&&" else _opposite(joint[1])
        self._blocks.append(_Block(runs, None, ""))
        following = self._followed(statements, at, joint)
        del self._blocks[depth]
        if len(self._blocks) > depth:  # a block begins here
            self._blocks[depth] = self._blocks[depth]._replace(joint=joint, runs=runs)
        return following

    def _followed(self, statements: list[Statement], at: int, joint: tuple[str, bool | None] | None = None) -> int:
        depth, negated, left_group = len(self._blocks), False, False
        words, line = list(statements[at].words), statements[at].line
        if self._blocks and self._blocks[-1].end == "esac" and ")" in words:
            words = words[words.index(")") + 1 :]  # after the pattern
        while words and (words[0] in _RESERVED or words[0] in _LOOPS or words[0] == "case" or _is_function(words)):
            first = words[0]
            if first in ("if", "elif"):
                return self._condition(statements, at, first)
            if words[:2] == ["(", "("]:  # arithmetic
                self._forget(_VARIABLE.findall(" ".join(words)))
                words = []
                break
            if first == "(":
                self._subshells.append([])
            elif first == ")":
                self._leave_subshell()
            negated ^= first == "!"
            rest = self._opened(words, statements[at : at + 2])
            words = words[1:] if rest is None else rest
            if (left := self._branch(first, line)) is not None:
                joint, left_group = left.joint, left.end == "}"
        taken, after = self._taken(), statements[at].after
        closed = words[-1:] == [")"]
        words = words[:-1] if closed else words
        # What a part of a pipeline or a background job assigns is lost.
        apart = after in ("|", "&") or (at > 0 and statements[at - 1].after == "|")
        if words and words[0] not in _TESTS and taken is not False:
            self._simple(words, sure=taken is True and not apart)
        if closed:
            self._leave_subshell()
        if words or not left_group:  # the status of a group is that of its last command
            self._last = self._status(words)
        self._last = _opposite(self._last) if negated else self._last
        if joint is not None and len(self._blocks) <= depth:
            self._last = (_both if joint[0] == "&&" else _either)(joint[1], self._last)
        if after in ("&&", "||"):
            self._joint = after, self._last
        return at + 1

    def _status(self, words: list[str]) -> bool | None:
        """Whether a command succeeds; None: unknown."""
        if words and words[0] in _TESTS:
            return self._truth(words)
        if words and (words[0] in _QUESTIONS or words[0] in self._functions):
            return None
        return _ALWAYS.get(words[0], True) if words else True

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
                self._forget(_VARIABLE.findall(" ".join(rest)) if rest[:1] == ["("] else rest[:1])
                return []
            return rest
        if first == "case":
            self._blocks.append(_Block(None, None, "esac"))
            return words[words.index(")") + 1 :] if ")" in words else []
        if _is_function(words):
            self._head = (rest[0] if first == "function" else first).removesuffix("(")
            body = [word for word in rest[first == "function" :] if word not in ("(", ")")]
            if body[:1] in ([], ["{"]):
                return body
            self._forget(match[1] for word in body if (match := _ASSIGNMENT.match(word)))  # a subshell of one line
            return []
        if first == "{":
            name = self._head
            self._blocks.append(_Block(None if name else True, None, "}", self._arguments if name else None, name))
            if name:
                self._functions.setdefault(name, set())
                self._arguments, self._head = ["<arguments>"], ""
        return None

    def _forget(self, names: Iterable[str], *, local: bool = False) -> None:
        """Set these variables to an unknown value."""
        variables = [name for name in names if _VARIABLE.fullmatch(name)]
        self._values.update({name: [f"<{name}>"] for name in variables})
        for block in self._blocks if not local else ():
            if block.function:
                self._functions[block.function].update(variables)

    def _leave_subshell(self) -> None:
        if self._subshells:
            self._forget(self._subshells.pop())

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
        self._blocks[-1] = self._blocks[-1]._replace(taken=_both(_opposite(before), truth), before=before)
        return at + 1

    def _branch(self, word: str, line: int) -> _Block | None:
        """Go to another branch, or leave a block; returns the block that was left."""
        end = self._blocks[-1].end if self._blocks else None
        if word in ("else", "fi") and end != "fi":
            raise ShellError(f"line {line}: `{word}` without its `if`")
        if word in ("done", "esac") and end != word:
            raise ShellError(f"line {line}: `{word}` without its {'loop' if word == 'done' else '`case`'}")
        if word == "else":
            taken, before, *_ = self._blocks[-1]
            self._blocks[-1] = self._blocks[-1]._replace(taken=_opposite(_either(taken, before)))
        elif word == end:
            left = self._blocks.pop()
            self._arguments = self._arguments if left.arguments is None else left.arguments
            return left
        return None

    def _taken(self) -> bool | None:
        result: bool | None = True
        for block in self._blocks:
            result = _both(result, _both(block.runs, block.taken))
        return result

    def _simple(self, raw: list[str], *, sure: bool) -> None:
        """Assignments and commands; if it is uncertain that they run, an assigned value becomes unknown."""
        self._sure = sure
        raw = _without_prefix(raw)
        declares = raw[0] in _DECLARES
        # Of such variables the value is not the text: integers, references, letters of one case.
        odd = declares and any(re.fullmatch("-[A-Za-z]*[ilnu][A-Za-z]*", word) for word in raw[1:])
        assignments: list[re.Match[str]] = []
        for word in raw[declares:]:
            if match := _ASSIGNMENT.fullmatch(word):
                assignments.append(match)
            elif element := _ELEMENT.fullmatch(word):
                assignments.append(element)
            elif not declares:
                break
            elif odd:
                self._forget([word])
        if declares:  # all values are those before the command
            new = [self._assigned(match) for match in assignments]
            for match, values in zip(assignments, new, strict=True):
                self._assign(match[1], values, sure=sure and not odd, local=raw[0] != "export")
            return
        if len(assignments) == len(raw):
            for match in assignments:
                self._assign(match[1], self._assigned(match), sure=sure)
            return
        # Assignments before a command are for that command alone.
        words = [field for word in raw[len(assignments) :] for field in self.expand(word)]
        if words:
            self._command(words, raw[len(assignments) :], sure=sure)

    def _command(self, words: list[str], raw: list[str], *, sure: bool) -> None:
        """A command, or a builtin that changes variables or the script's arguments."""
        name, rest = words[0], words[1:]
        if name == "shift":
            self._shift("".join(rest[:1]) or "1", sure=sure)
        elif name == "set" and "--" in rest:
            self._arguments = rest[rest.index("--") + 1 :] if sure else ["<arguments>"]
        elif name == "unset" and sure and not self._subshells:
            for variable in rest:
                self._values.pop(variable, None)
        elif name in ("read", "mapfile", "readarray", "unset"):
            self._forget(rest)
        elif name == "let":
            self._forget(_VARIABLE.findall(" ".join(raw[1:])))
        elif name == "printf" and rest[:1] == ["-v"]:
            self._forget(rest[1:2])
        elif name == "exit" and sure and not self._blocks and not self._subshells:
            self._ended = True
        elif name == "eval":
            reader = _ShellReader(self._arguments, self._work)
            self._commands += reader.read(" ".join(rest))
            for variable in reader._values.keys() - {"PWD"}:
                self._assign(variable, reader._values[variable], sure=sure)
        else:
            self._forget(self._functions.get(name, ()))
            self._commands.append(words)

    def _shift(self, count: str, *, sure: bool) -> None:
        if sure and _INTEGER.fullmatch(count):
            del self._arguments[: max(int(count), 0)]
        elif self._arguments:
            self._arguments = ["<arguments>"]

    def _assign(self, name: str, values: list[str] | None, *, sure: bool, local: bool = False) -> None:
        """Set a variable; None: to an unknown value."""
        if self._subshells:
            self._subshells[-1].append(name)
        if sure and values is not None:
            self._values[name] = values
        else:
            self._forget([name], local=local)

    def _assigned(self, match: re.Match[str]) -> list[str] | None:
        """The new value of an assignment; None: unknown."""
        if match.re is _ELEMENT:
            return None
        name, plus, raw = match.groups()
        old = self._values.get(name, []) if plus else []
        self._work.add(sum(map(len, self._values.get(name, []))) // 64 + 1)  # which are copied
        if raw.startswith("("):
            statements = split_statements(raw[1:-1])
            return [*old, *(field for line in statements for word in line.words for field in self.expand(word))]
        raw = _TILDE.sub("$HOME", raw)
        text = " ".join(self.expand(f'"{raw}"' if raw[:1] not in ("'", '"') else raw))
        return ["".join(old[:1]) + text, *old[1:]]

    def expand(self, raw: str) -> list[str]:
        """The fields of a raw word: quotes removed, variables expanded, split at blanks as in bash."""
        fields: list[str] = []
        current: str | None = None
        for values, quoted in self._parts(_TILDE.sub("$HOME", raw), quoted=False):
            self._work.add(sum(map(len, values)) + len(values))
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
        if "IFS" in self._values and not set(value).isdisjoint("".join(self._values["IFS"]) + " \t\n"):
            return [_unknown_word(value)]
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
                yield [_unknown_word(text) if "\\" in text else text], True
                at = end
            elif raw.startswith("$[", at):
                end = (raw.find("]", at) + 1) or len(raw)
                yield [_unknown_word(raw[at:end])], True
                at = end
            elif not quoted and (alternatives := _ALTERNATIVES.match(raw, at)):
                yield [_unknown_word(alternatives.group())], True
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
                self._forget(_VARIABLE.findall(inside))
                return [_unknown_word(inside.strip("$()"))], True
            names = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(self._value(name.group())), text)
            if (value := _calculated(names)) is not None:
                return [str(value)], True
        if inside.strip("$()` ") == "pwd":
            return ["."], True
        return [_unknown_word(inside.strip("$()`"))], True

    def _value(self, reference: str) -> list[str]:
        """The value of an expression in braces: NAME, NAME[@], NAME:-default, @, 1."""
        match = _BRACES.fullmatch(reference)
        if not match:
            return (
                [str(len(self._arguments))]
                if reference == "#" and self._arguments != ["<arguments>"]
                else [_unknown_word(reference)]
            )
        name, listed, default_mark, default = match.groups()
        if name in ("@", "*"):
            return self._arguments
        if name.isdigit():
            values = self._arguments[int(name) - 1 : int(name)] if int(name) else ["<script>"]
            if not values and self._arguments == ["<arguments>"]:
                values = [f"<argument_{name}>"]
            is_set = bool(values)
        else:
            values = self._values.get(name, [])
            values = values if listed else values[:1]  # the first of an array
            is_set = name in self._values
        if default_mark:
            is_empty = not is_set or (":" in default_mark and not "".join(values))
            if default_mark.endswith("+") and any(map(unknown, values)):
                return [f"<{name}>"]
            if is_empty != default_mark.endswith("+"):
                word = " ".join(self.expand(f'"{default}"' if default[:1] not in ("'", '"') else default))
                if default_mark.endswith("="):
                    self._assign(name, [word], sure=self._sure)
                return [word]
            if is_empty:
                return [""]
        if not is_set:
            return [f"<argument_{name}>" if name.isdigit() else f"<{name}>"]
        return values

    def _truth(self, tokens: Sequence[str]) -> bool | None:
        """A condition of tests on strings and numbers, joined by && and ||; None: unknown."""
        if "[[" in tokens and "&&" in tokens and "||" in tokens:
            return None  # && binds more tightly inside [[ ]], and not between commands
        result: bool | None = None
        joint, atom = "", []  # type: str, list[str]
        for token in [*tokens, ";"]:
            if token in ("[", "[[", "]", "]]", "\n") or (token == "test" and not atom):
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
            if name and not re.fullmatch(r'"?\$\{?\w+\}?"?', raw[1]):
                return None  # a part of a variable, or an element
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


def _unknown_word(text: str) -> str:
    return "<output_of_" + re.sub(r"\W+", "_", text)[:24] + ">"


def _is_function(words: Sequence[str]) -> bool:
    """Whether these words define a function: `function f`, `f()` or `f ()`."""
    if words[0] == "function":
        return True
    begins = [words[0][-1:], *words[1:3]]
    return words[0].removesuffix("(").isidentifier() and ["(", ")"] in (begins[:2], begins[1:])


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


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    return _opposite(_both(_opposite(left), _opposite(right)))


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value
