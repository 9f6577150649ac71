"""Shares, and the exact integer weights computed from them.

The number of a share is a decimal ("0.7", "1e-3") or a fraction ("1/3"), kept as the text that was given; floats are
refused, because 0.1 as a float is not 0.1. The weights have exactly the ratios of the numbers if their sum is at most
2^62; otherwise they are rounded by largest remainder to a sum of exactly 2^62.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cached_property
from typing import Literal

from mdata.errors import UsageError

Unit = Literal["weight", "tokens", "samples", "epochs"]
WEIGHT: Unit = "weight"
# Who set a share: the user, or, if the user gave none, the sizes of corpora.
SetBy = Literal["user", "tokens"]
USER: SetBy = "user"
TOKENS: SetBy = "tokens"

LARGEST_SUM = 1 << 62
_SHORT = 20  # longest decimal, in characters, that is still readable

# Far beyond any use, and small enough for a Fraction to be built quickly.
_LARGEST_EXPONENT, _LONGEST_TEXT = 400, 1000
# What a manifest can store (`ShareText`).
TEXT_LIMITS = "at most 30 digits on each side of the point or /, and an exponent of at most two digits"
_LARGEST_ALPHA = 10
_POWER_DIGITS = 18  # digits of tokens^alpha; fixed, because the text is stored in manifests
_EXPONENT = re.compile(r"[eE]([-+]?[0-9_]+)\s*$")

Number = str | int | Fraction


class TooLong(ValueError):
    """The text of a number is too long, or its exponent too large."""


@dataclass(frozen=True)
class Share:
    """The share of a component or group in a phase; 0: not read.

    Args:
        text: the number as given.
        unit: what it counts; weights divide what amounts leave of a phase, all other units are amounts.
        set_by: None: not recorded in an older manifest.
    """

    text: str
    unit: Unit = WEIGHT
    set_by: SetBy | None = USER

    @cached_property
    def amount(self) -> Fraction:
        """The number.

        Raises:
            UsageError: the text is not a number.
        """
        return exact(self.text)

    def __str__(self) -> str:
        return self.text if self.unit == WEIGHT else f"{self.text} {self.unit}"


NOTHING = Share("0")


def exact(share: str) -> Fraction:
    """The number in a share's text.

    Raises:
        UsageError: the text is not a number.
    """
    try:
        return fraction_of(share)
    except TooLong as error:
        raise UsageError(f"a share has {error}", expected=TEXT_LIMITS) from None
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError("a share is not a number", found=repr(share[:60]), expected='0.7, 3, 1e9 or "1/3"') from error


def fraction_of(text: str) -> Fraction:
    """The number in a text, in bounded time and memory: Fraction("1e99999999") takes minutes.

    Raises:
        TooLong: it has more digits or a larger exponent than a share needs. ValueError, ZeroDivisionError: no number.
    """
    exponent = _EXPONENT.search(text[:_LONGEST_TEXT])
    if not text.isascii():  # Fraction takes the digits of all scripts, of which the exponent may be made, too
        raise ValueError(f"not a number: {text[:60]!r}")
    if len(text) > _LONGEST_TEXT or (exponent is not None and abs(int(exponent[1])) > _LARGEST_EXPONENT):
        raise TooLong(f"too many digits, or too large an exponent: {text[:60]!r}")
    return Fraction(text)


def as_text(share: Fraction) -> str:
    """A number as the text of a share: a short decimal if possible, otherwise a fraction."""
    decimal = format(Decimal(share.numerator) / Decimal(share.denominator), "f")
    return decimal if len(decimal) <= _SHORT and Fraction(decimal) == share else str(share)


def integer_weights(shares: Sequence[Number], names: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return one positive integer per share, in the ratio of the shares, with a sum of at most 2^62.

    Unless they had to be rounded, the weights have no common factor, so equal blends have equal weights in any
    notation.

    Raises:
        UsageError: a share that is not a number, not positive, or too small compared with the others to be a weight.
    """
    names = names if names is not None else [f"component {i}" for i in range(len(shares))]
    assert shares and len(names) == len(shares), f"{len(shares)} shares for {len(names)} names"
    numbers = [_positive(share, name) for share, name in zip(shares, names, strict=True)]
    scale = math.lcm(*(share.denominator for share in numbers))
    weights = [int(share * scale) for share in numbers]
    common = math.gcd(*weights)
    weights = [weight // common for weight in weights]
    if sum(weights) > LARGEST_SUM:
        weights = _round_to_sum(weights, LARGEST_SUM)
    for weight, name, share in zip(weights, names, shares, strict=True):
        if weight == 0:
            raise UsageError(
                f"the share of {name} is too small compared with the others",
                found=str(share),
                expected="at least 2^-62 of the sum of all shares",
                fix="leave the component out, or give it more",
            )
    return tuple(weights)


def by_tokens(tokens: int, alpha: str | None) -> str:
    """tokens^alpha as text of at most 18 digits, the same on every machine.

    Raises:
        UsageError: alpha is beyond any use, and the power beyond what a share may be.
    """
    if alpha is None or not tokens:
        return str(tokens)
    if Decimal(alpha) > _LARGEST_ALPHA:
        raise UsageError(f"alpha is {alpha[:60]}", expected=f"at most {_LARGEST_ALPHA}: 1 by tokens, 0 equally")
    context = Context(prec=_POWER_DIGITS)
    power = context.power(Decimal(tokens), Context(prec=_POWER_DIGITS).create_decimal(str(Decimal(alpha))))
    return format(power.normalize(context), "f")


def _positive(share: Number, name: str) -> Fraction:
    try:
        exact_share = fraction_of(share) if isinstance(share, str) else share
        value = Fraction(0) if isinstance(exact_share, float | bool) else Fraction(exact_share)
    except TooLong:
        problem = f"the share of {name} has too many digits, or too large an exponent"
        raise UsageError(problem, found=repr(str(share)[:60]), expected=TEXT_LIMITS) from None
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise UsageError(
            f"the share of {name} is not a positive number",
            found=repr(share),
            expected='a number above 0, such as 0.7, 3 or "1/3"',
            fix="leave out what should not be read",
        )
    return value


def _round_to_sum(weights: list[int], total: int) -> list[int]:
    """Largest remainder method: floors, then one more for the largest remainders, the first among equals."""
    weight_sum = sum(weights)
    floors = [weight * total // weight_sum for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(weights[i] * total % weight_sum))
    for i in by_remainder[: total - sum(floors)]:
        floors[i] += 1
    return floors
