"""A reader of bash scripts such as Megatron-LM's examples: variables, arrays, arithmetic, `if` and `case` on strings.

Nothing is run. Only assignments of the script are followed; the result is the commands as words, in order. An unknown
value becomes a word `<NAME>` (expansion.py), so that only an argument that needs it must be refused. The body of a
loop or a function is read once, and the variables that it assigns become unknown, as do those of a branch that may or
may not run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple

from trainer.migrate.expansion import INTEGER, TILDE, VARIABLE, WordExpander, Work, unknown
from trainer.migrate.lexer import CASE_ENDS, ShellError, Statement, split_statements

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[.*\]\+?=.*", re.DOTALL)  # A[1]=x
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_TESTS = frozenset({"[", "[[", "test"})
# Commands that scripts ask something; others are assumed to succeed.
_QUESTIONS = frozenset({"command", "diff", "grep", "hash", "ls", "nvidia-smi", "pgrep", "type", "which"})
_ALWAYS = MappingProxyType({"true": True, ":": True, "false": False})
_LOOPS = frozenset({"for", "while", "until", "select"})
_RESERVED = frozenset(
    {"if", "elif", "else", "then", "fi", "do", "done", "esac", "{", "}", "(", ")", "!", "time", "exec", *CASE_ENDS}
)
_NUMBERS = MappingProxyType(
    {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt}
    | {"-le": operator.le}
)


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


class _Block(NamedTuple):
    """A part of the script that may or may not run.

    Args:
        taken: whether it runs; before: whether an earlier branch did. None: unknown.
        end: the word that ends it; "": one command.
        arguments: the script's, restored at the end of a function's body.
        function: the name of the function whose body it is.
        joint: of a block after && or ||: that operator, and whether what is before it succeeds.
        runs: whether what is before it lets it run.
        subject: of a `case`: the value that patterns are compared with; None: unknown.
        matched: of a `case` that a pattern follows: whether one before it, joined by |, fits; False: there was none.
        at_pattern: of a `case`: whether a pattern follows.
    """

    taken: bool | None
    before: bool | None
    end: str
    arguments: list[str] | None = None
    function: str = ""
    joint: tuple[str, bool | None] | None = None
    runs: bool | None = True
    subject: str | None = None
    matched: bool | None = False
    at_pattern: bool = False


def _without_prefix(raw: list[str]) -> list[str]:
    """The words of a command without `command` and `builtin`, which run what follows them."""
    while raw[0] in ("command", "builtin"):
        rest = raw[2:] if raw[1:2] == ["--"] else raw[1:]
        if not rest or rest[0].startswith("-") or _ASSIGNMENT.fullmatch(rest[0]):
            break
        raw = rest
    return raw


class _ShellReader(WordExpander):
    """The variables so far, and the commands."""

    def __init__(self, arguments: Sequence[str], work: Work) -> None:
        super().__init__(arguments, work)
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
        self.work.add(len(text))
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
        piped = at > 0 and statements[at - 1].after == "|" and not (self._blocks and self._blocks[-1].at_pattern)
        words, line = self._after_pattern(list(statements[at].words)), statements[at].line
        while words and (words[0] in _RESERVED or words[0] in _LOOPS or words[0] == "case" or _is_function(words)):
            first = words[0]
            if first in ("if", "elif"):
                return self._condition(statements, at, first)
            if words[:2] == ["(", "("]:  # arithmetic
                self.forget(VARIABLE.findall(" ".join(words)))
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
        apart = after in ("|", "&") or piped
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
                self.forget(VARIABLE.findall(" ".join(rest)) if rest[:1] == ["("] else rest[:1])
                return []
            return rest
        if first == "case":
            subject = " ".join(self.expand(rest[0])) if rest else ""
            known = subject if not unknown(subject) else None
            self._blocks.append(_Block(False, False, "esac", subject=known, at_pattern=True))
            return self._after_pattern(rest[2:])
        if _is_function(words):
            self._head = (rest[0] if first == "function" else first).removesuffix("(")
            body = [word for word in rest[first == "function" :] if word not in ("(", ")")]
            if body[:1] in ([], ["{"]):
                return body
            self.forget(match[1] for word in body if (match := _ASSIGNMENT.match(word)))  # a subshell of one line
            return []
        if first == "{":
            name = self._head
            self._blocks.append(_Block(None if name else True, None, "}", self.arguments if name else None, name))
            if name:
                self._functions.setdefault(name, set())
                self.arguments, self._head = ["<arguments>"], ""
        return None

    def _after_pattern(self, words: list[str]) -> list[str]:
        """The words after the pattern of a branch of a `case`, if one begins here; a pattern may end at a later |."""
        if not (words and self._blocks and self._blocks[-1].at_pattern and words[0] != "esac"):
            return words
        block, stop = self._blocks[-1], words.index(")") if ")" in words else len(words)
        for pattern in words[words[0] == "(" : stop]:
            block = block._replace(matched=_either(block.matched, self._fits(pattern, block.subject)))
        if stop < len(words):
            before = _either(block.taken, block.before)
            taken = _both(_opposite(before), block.matched)
            block = block._replace(taken=taken, before=before, matched=False, at_pattern=False)
        self._blocks[-1] = block
        return words[stop + 1 :]

    def _fits(self, pattern: str, subject: str | None) -> bool | None:
        """Whether the subject of a `case` is of this pattern; None: unknown, as with most wildcards."""
        if pattern == "*":
            return True
        text = " ".join(self.expand(pattern))
        if subject is None or unknown(text) or re.search(r"[*?[(]", text):
            return None
        return text == subject

    def forget(self, names: Iterable[str], *, local: bool = False) -> None:
        """Set these variables to an unknown value."""
        variables = [name for name in names if VARIABLE.fullmatch(name)]
        self.values.update({name: [f"<{name}>"] for name in variables})
        for block in self._blocks if not local else ():
            if block.function:
                self._functions[block.function].update(variables)

    def _leave_subshell(self) -> None:
        if self._subshells:
            self.forget(self._subshells.pop())

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
        if word in CASE_ENDS:
            if end != "esac":
                raise ShellError(f"line {line}: `{word}` without its `case`")
            block = self._blocks[-1]._replace(at_pattern=True)
            if word != ";;":  # the next branch may run, too
                block = block._replace(subject=None, taken=None)
            self._blocks[-1] = block
        if word in ("else", "fi") and end != "fi":
            raise ShellError(f"line {line}: `{word}` without its `if`")
        if word in ("done", "esac") and end != word:
            raise ShellError(f"line {line}: `{word}` without its {'loop' if word == 'done' else '`case`'}")
        if word == "else":
            taken, before, *_ = self._blocks[-1]
            self._blocks[-1] = self._blocks[-1]._replace(taken=_opposite(_either(taken, before)))
        elif word == end:
            left = self._blocks.pop()
            self.arguments = self.arguments if left.arguments is None else left.arguments
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
                self.forget([word])
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
            self.arguments = rest[rest.index("--") + 1 :] if sure else ["<arguments>"]
        elif name == "unset" and sure and not self._subshells:
            for variable in rest:
                self.values.pop(variable, None)
        elif name in ("read", "mapfile", "readarray", "unset"):
            self.forget(rest)
        elif name == "let":
            self.forget(VARIABLE.findall(" ".join(raw[1:])))
        elif name == "printf" and rest[:1] == ["-v"]:
            self.forget(rest[1:2])
        elif name == "exit" and sure and not self._blocks and not self._subshells:
            self._ended = True
        elif name == "eval":
            reader = _ShellReader(self.arguments, self.work)
            self._commands += reader.read(" ".join(rest))
            for variable in reader.values.keys() - {"PWD"}:
                self._assign(variable, reader.values[variable], sure=sure)
        else:
            self.forget(self._functions.get(name, ()))
            self._commands.append(words)

    def _shift(self, count: str, *, sure: bool) -> None:
        if sure and INTEGER.fullmatch(count):
            del self.arguments[: max(int(count), 0)]
        elif self.arguments:
            self.arguments = ["<arguments>"]

    def assign(self, name: str, values: list[str]) -> None:
        """Set a variable, if the command that is followed is sure to run; otherwise to an unknown value."""
        self._assign(name, values, sure=self._sure)

    def _assign(self, name: str, values: list[str] | None, *, sure: bool, local: bool = False) -> None:
        """Set a variable; None: to an unknown value."""
        if self._subshells:
            self._subshells[-1].append(name)
        if sure and values is not None:
            self.values[name] = values
        else:
            self.forget([name], local=local)

    def _assigned(self, match: re.Match[str]) -> list[str] | None:
        """The new value of an assignment; None: unknown."""
        if match.re is _ELEMENT:
            return None
        name, plus, raw = match.groups()
        old = self.values.get(name, []) if plus else []
        self.work.add(sum(map(len, self.values.get(name, []))) // 64 + 1)  # which are copied
        if raw.startswith("("):
            statements = split_statements(raw[1:-1])
            return [*old, *(field for line in statements for word in line.words for field in self.expand(word))]
        raw = TILDE.sub("$HOME", raw)
        text = " ".join(self.expand(f'"{raw}"' if raw[:1] not in ("'", '"') else raw))
        return ["".join(old[:1]) + text, *old[1:]]

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
            if name and (name[1] in self.values or name[1].startswith("output_of_")):
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
        if how in _NUMBERS and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
            return bool(_NUMBERS[how](int(left), int(right)))
        return None


def _is_function(words: Sequence[str]) -> bool:
    """Whether these words define a function: `function f`, `f()` or `f ()`."""
    if words[0] == "function":
        return True
    begins = [words[0][-1:], *words[1:3]]
    return words[0].removesuffix("(").isidentifier() and ["(", ")"] in (begins[:2], begins[1:])


def _both(left: bool | None, right: bool | None) -> bool | None:
    """`and` of truth values, of which None is unknown."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    return _opposite(_both(_opposite(left), _opposite(right)))


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value
