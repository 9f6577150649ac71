"""Limits for templates from untrusted sources: the number of steps, and the size of any value.

A sandbox keeps a template from files and from the interpreter, but not from looping 10^9 times or doubling a text forty
times. Here every iteration of a loop, call and filter counts as a step; the results of operators, calls, filters and
output are bounded before they are computed. The limits grow with the conversation, so that a long one is not refused.
What is unusual: loops, macros and ~ are rewritten in the parsed template, because Jinja has no hook for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mdata.errors import counted

STEPS, STEPS_PER_MESSAGE, CHARACTERS_PER_STEP = 200_000, 2_000, 16
CHARACTERS, CHARACTERS_PER_GIVEN = 1 << 20, 16
_CHARACTERS_OF_A_STEP, _MEMBERS_OF_A_STEP = 1024, 16  # what is copied or looked through counts too
_MOST_BITS = 4096  # of a whole number
_LARGEST_ARGUMENT = 1_000_000  # of a method or filter, where a number may be a width
_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*")
_NUMBER, _LONGEST_NUMBER = re.compile(r"\d+"), 9


class LimitReached(TemplateRuntimeError):
    """A template exceeded the limit of steps or of sizes."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits; `begin` resets the count, for one rendering at a time."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(finalize=self._measured, **options)
        self._steps = self._most_steps = self._most = 0
        self.filters = {name: self._limited(name, filter) for name, filter in {**self.filters, **filters}.items()}
        del self.globals["lipsum"]
        self.begin(messages=0, characters=0)

    def begin(self, *, messages: int, characters: int) -> None:
        """Start a rendering of this many messages with this many characters."""
        self._steps = 0
        self._most_steps = STEPS + STEPS_PER_MESSAGE * messages + characters // CHARACTERS_PER_STEP
        self._most = CHARACTERS + CHARACTERS_PER_GIVEN * characters

    def rendered(self, template: Any, variables: Mapping[str, Any]) -> str:
        """The rendered text of a template."""
        parts, size = [], 0
        for part in template.generate(**variables):
            parts.append(part)
            size += len(part)
            self._refuse_above(size)
        return "".join(parts)

    def step(self, count: int = 1) -> None:
        """Count one step, or the given number of steps."""
        self._steps += count
        if self._steps > self._most_steps:
            raise LimitReached(f"it takes more than {counted(self._most_steps, 'step')}")

    def looked(self, value: Any) -> Any:
        """Count the size of a value in a comparison."""
        self._check_size(self._size(value))
        return value

    def joined(self, *parts: Any) -> str:
        """The result of ~."""
        self._check_size(sum(self._size(part) for part in parts))
        text = "".join(map(str, parts))
        self._check_size(len(text))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator; called by Jinja for `intercepted_binops`."""
        if operator == "+" and type(left) is type(right) is str and len(left) + len(right) < _CHARACTERS_OF_A_STEP:
            return left + right  # almost all operations of templates, and too small to check
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator in ("+", "*", "**"):
            self._check_size(_size_of(operator, left, right))
        return self._measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **options: Any) -> Any:
        """The result of a call; called by Jinja."""
        __self.step()
        if __obj == __self.step:  # inserted by us
            return __self.step(*arguments)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps str.format
        if isinstance(owner, str | int | float):
            arguments = __self._check_method(__obj.__name__, owner, arguments, options)
        return __self._measured(super().call(__context, __obj, *arguments, **options))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return template.set_environment(self)  # type: ignore[return-value]

    def _limited(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts steps, with bounded arguments and result."""

        @wraps(filter)  # its attributes say what Jinja passes before the value
        def limited(*arguments: Any, **options: Any) -> Any:
            self.step()
            first = int(hasattr(filter, "jinja_pass_arg"))
            before, values_in = arguments[:first], arguments[first:]
            if values_in:
                values_in = (values_in[0], *self._check_method(name, values_in[0], values_in[1:], options))
                if name == "join":
                    values = list(values_in[0])
                    between = str(options.get("d", values_in[1] if len(values_in) > 1 else ""))
                    self._check_size(sum(self._size(value) + len(between) for value in values))
                    values_in = (values, *values_in[1:])
            arguments = (*before, *values_in)
            return self._measured(filter(*arguments, **options))

        return limited

    def _check_method(
        self, name: str, owner: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Bound the result of a method or filter; returns the arguments, with a generator turned into a list."""
        all_arguments = (*arguments, *options.values())
        sizes = [self._size(value) for value in (owner, *all_arguments)]
        self._check_size(sum(sizes))
        if name in ("format", "format_map"):
            self._check_format(str(owner), all_arguments)
            return arguments
        if any(isinstance(value, int) and abs(value) > _LARGEST_ARGUMENT for value in all_arguments):
            raise LimitReached(f"it gives {name} a number above {_LARGEST_ARGUMENT:,}")
        if not isinstance(owner, str):
            return arguments
        if name == "replace" and len(arguments) > 1:
            self._check_size(len(owner) + owner.count(str(arguments[0])) * len(str(arguments[1])))
        elif name == "join" and arguments:
            values = list(arguments[0])
            self._check_size(sum(self._size(value) + len(owner) for value in values))
            return (values, *arguments[1:])
        elif name in ("indent", "expandtabs"):
            wide = max((value for value in all_arguments if isinstance(value, int)), default=8)
            wide = max([wide, *(len(value) for value in all_arguments if isinstance(value, str))])
            self._check_size(len(owner) + wide * (1 + sum(map(owner.count, "\n\t\r"))))
        elif name == "translate":
            self._check_size(len(owner) * sum(sizes[1:]))
        return arguments

    def _check_format(self, text: str, arguments: Iterable[Any]) -> None:
        """Bound the result of a format: one value per field, each as wide as any number in a field."""
        fields = _FIELD.findall(text)
        numbers = [number for field in fields for number in _NUMBER.findall(field)]
        values = [member for value in arguments for member in (value.values() if isinstance(value, dict) else (value,))]
        if any("*" in field for field in fields) or re.search(r"\{[^{}]*\{", text):
            numbers += [str(abs(value)) for value in values if isinstance(value, int)] * len(fields)
        if any(len(number) > _LONGEST_NUMBER for number in numbers):
            raise LimitReached(f"it formats with a number of more than {_LONGEST_NUMBER} digits")
        largest = max((self._size(value) for value in [*arguments, *values]), default=0)
        self._check_size(len(text) + sum(map(int, numbers)) + len(fields) * largest)

    def _measured(self, value: Any) -> Any:
        """The value, after checking that it is not too large."""
        if isinstance(value, str):
            self._check_size(len(value))
        elif isinstance(value, bytes | bytearray):
            raise LimitReached("it makes bytes, and a conversation is text")
        elif isinstance(value, int):
            self._check_size(0 if value.bit_length() <= _MOST_BITS else self._most + 1)
        elif isinstance(value, list | tuple | dict):
            self._check_size(self._size(value))
        return value

    def _size(self, value: Any) -> int:
        """Characters and members of a value and of everything in it, counted as often as it occurs.

        Counting stops a little above the limit.
        """
        if isinstance(value, str):
            return len(value)
        size, members, waiting = 0, 0, [value]
        while waiting and size <= self._most:
            item = waiting.pop()
            size += len(item) if isinstance(item, str | range) else 1
            members += len(item) if isinstance(item, range) else 1
            if isinstance(item, dict):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                waiting += item
        self.step(members // _MEMBERS_OF_A_STEP)
        return size

    def _check_size(self, size: int) -> None:
        """Count and bound the work of making or scanning a value of this size."""
        if size >= _CHARACTERS_OF_A_STEP:
            self._refuse_above(size)
            self.step(size // _CHARACTERS_OF_A_STEP)

    def _refuse_above(self, size: int) -> None:
        if size > self._most:
            raise LimitReached(f"it makes a value of more than {self._most:,} characters")


def _size_of(operator: str, left: Any, right: Any) -> int:
    """The size of a result before it is computed; 0 if it is certainly small, or if Python would refuse it."""
    long = [value for value in (left, right) if isinstance(value, str | list | tuple)]
    integers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "+" and len(long) == 2:
        return len(left) + len(right)
    if operator == "*" and long and integers:
        return len(long[0]) * max(integers[0], 0)
    if operator == "**" and len(integers) == 2:
        return 0 if left.bit_length() * max(right, 0) <= _MOST_BITS else 1 << 62
    return 0


class _Counted(NodeTransformer):
    """Inserts a step at the start of the body of each loop and macro, and replaces ~ by our own function."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """A value that is compared with a constant of the template is scanned no further than the constant's size."""
        self.generic_visit(node)
        if any(
            isinstance(operand_node, nodes.Const)
            for operand_node in (node.expr, *(o.expr for o in node.ops if "in" not in o.op))
        ):
            looked = [operand for operand in node.ops if "in" in operand.op]
        else:
            node.expr, looked = _asked("looked", node.expr), node.ops
        for operand in looked:
            operand.expr = _asked("looked", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _asked("joined", *node.nodes)

    def _counting(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        texts = [child.data for child in node.find_all(nodes.TemplateData)]
        texts += [child.value for child in node.find_all(nodes.Const) if isinstance(child.value, str)]
        step = _asked("step", nodes.Const(1 + sum(map(len, texts)) // _CHARACTERS_OF_A_STEP, lineno=node.lineno))
        if getattr(node, "test", None) is not None:  # of a loop: it is asked where the body is not reached, too
            node.test = nodes.Or(step, node.test, lineno=node.lineno)  # a step is none, and none is false
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_Block = visit_CallBlock = _counting


def _asked(name: str, *arguments: nodes.Expr) -> nodes.Call:
    """A call node for a method of the sandbox."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=arguments[0].lineno)
