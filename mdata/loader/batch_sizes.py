"""How many samples a step reads: constant, growing, or by a table; a pure function of the counter of consumed samples.

`constant`, `ramp_up` (Megatron's --rampup-batch-size) and `by_steps` (its table) give `BatchSizes`: the size of a step
by the first sample that it reads, so the steps are the same for any number of ranks and after any resume. `in_force`
checks that the ranks can divide a size evenly, or rounds it down if requested.

Unlike Megatron, which divides by zero, a ramp without steps or samples is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mdata.errors import UsageError, counted

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"([-+0-9.eE_]+)([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of global batches; can be compared and pickled.

    Args:
        table: (consumed samples from which a size holds, size); ascending, the first at 0. If set, a ramp's `until` and
            `per` decide instead.
        until: consumed samples after which the last size holds.
        per: consumed samples for each step of a ramp, a double as in Megatron.
    """

    table: tuple[tuple[int, int], ...]
    until: int | None = None
    per: float | None = None

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        if len(self.table) == 1:
            return self.table[0][1]
        if self.until is not None and self.per is not None:
            place = len(self.table) - 1 if consumed > self.until else int(consumed / self.per)
            return self.table[min(place, len(self.table) - 1)][1]
        return next(size for start, size in reversed(self.table) if start <= consumed)

    def in_force(self, consumed: int, *, micro_batch: int, dp_size: int, decrease: bool = False) -> int:
        """The size, checked to be divisible among the ranks.

        Args:
            consumed: samples read before.
            micro_batch, dp_size: rows of a forward pass, ranks.
            decrease: round down; the steps then depend on the number of ranks.

        Raises:
            UsageError: no multiple of `micro_batch` x `dp_size`, or less than that.
        """
        size, part = self.at(consumed), micro_batch * dp_size
        if part < 1:
            raise UsageError(
                f"microbatches of {micro_batch} for {counted(dp_size, 'rank')}", expected="both at least 1"
            )
        fitting = size // part * part
        if fitting < 1 or (fitting != size and not decrease):
            raise UsageError(
                f"the global batch of {size} samples after {consumed} cannot be divided among {dp_size} ranks",
                found=f"microbatches of {micro_batch}: at least {counted(part, 'sample')}",
                expected=f"a multiple of {part}",
                fix="other batch sizes, a smaller microbatch, or another number of data-parallel ranks",
            )
        return fitting

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, in order."""
        return tuple(size for _, size in self.table)

    def steps(self, consumed: int = 0) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each step from `consumed` on, without end."""
        while True:
            size = self.at(consumed)
            yield consumed, size
            consumed += size

    def after(self, num_steps: int, *, consumed: int = 0) -> int:
        """Samples consumed after `num_steps` more steps."""
        while num_steps > 0:
            alike = self._steps_alike(consumed)
            count = num_steps if alike is None else min(num_steps, alike)
            consumed += count * self.at(consumed)
            num_steps -= count
        return consumed

    def within(self, num_samples: int, *, consumed: int = 0) -> int:
        """How many more steps after `consumed` samples end at or before sample `num_samples`.

        The inverse of `after`, rounded down: a step that would read further is not begun.
        """
        steps = 0
        while True:
            size, alike = self.at(consumed), self._steps_alike(consumed)
            fitting = max(0, num_samples - consumed) // size
            if alike is None or fitting < alike:
                return steps + fitting
            steps, consumed = steps + alike, consumed + alike * size

    def last_steps(self, num_steps: int, *, end: int) -> int:
        """Samples of the last `num_steps` of the steps that end at or before sample `end`.

        Steps before the first one, where there are fewer, count with its size.
        """
        steps = self.within(end)
        missing = max(0, num_steps - steps)
        return self.after(steps) - self.after(max(0, steps - num_steps)) + missing * self.at(0)

    def _steps_alike(self, consumed: int) -> int | None:
        """How many steps after `consumed` samples have the size of the first one; None: all. For a ramp, 1."""
        if len(self.table) == 1 or consumed > (self.table[-1][0] if self.until is None else self.until):
            return None
        if self.until is not None:
            return 1
        end = next((start for start, _ in self.table if start > consumed), None)
        return None if end is None else -(-(end - consumed) // self.at(consumed))


def constant(size: int) -> BatchSizes:
    """Steps of one size.

    Raises:
        UsageError: a size below 1.
    """
    if size < 1:
        raise UsageError(f"a global batch of {size} samples", expected="1 or more")
    return BatchSizes(((0, size),))


def ramp_up(start: int, increment: int, *, samples: int, size: int) -> BatchSizes:
    """Megatron's ramp: from `start` to `size` in steps of `increment`, spread evenly over `samples` samples.

    Raises:
        UsageError: the increment does not divide the difference, or a value below 1.
    """
    ramp = f"start {start}, increment {increment}, over {counted(samples, 'sample')}, to {size}"
    if start < 1 or increment < 1 or samples < 1 or size <= start:
        raise UsageError(
            "the batch size ramp does not increase",
            found=ramp,
            expected="1 or more of each, and a start below the global batch",
        )
    if (size - start) % increment:
        raise UsageError(
            "the batch size ramp never reaches the global batch",
            found=ramp,
            expected=f"{size} - {start} = {size - start} in whole steps of {increment}",
            fix=f"a global batch of {start + -(-(size - start) // increment) * increment}, or another increment",
        )
    count = (size - start) // increment
    table = tuple((samples * i // count, start + i * increment) for i in range(count + 1))
    return BatchSizes(table, samples, samples / count)


def read_ramp(words: str, *, size: int) -> BatchSizes:
    """Parse a ramp "START INCREMENT SAMPLES" up to `size`; an empty text gives constant steps of that size.

    Raises:
        UsageError: not three integers; or as `ramp_up` and `constant`.
    """
    numbers = words.split()
    if not numbers:
        return constant(size)
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise UsageError(
            "a ramp is three integers",
            found=repr(words),
            expected='"START INCREMENT SAMPLES", such as "32 32 100000"',
        )
    start, increment, samples = map(int, numbers)
    return ramp_up(start, increment, samples=samples, size=size)


def by_steps(text: str, *, sequence_length: int | None = None) -> BatchSizes:
    """A table as Megatron writes it, "0:768 250B:1536 500B:3072": thresholds and sizes.

    Args:
        text: entries parted by blanks or commas; numbers may end in K, M, B or T.
        sequence_length: thresholds are tokens of samples of this length; None: thresholds are samples.

    Raises:
        UsageError: an entry that cannot be read, thresholds that do not begin at 0 and rise, a size below 1.
    """
    entries = []
    for entry in text.replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise UsageError(f"{entry!r} is not THRESHOLD:SIZE", found=repr(text))
        number = _amount(threshold, text)
        entries.append((number if sequence_length is None else number // sequence_length, _amount(size, text)))
    entries.sort()
    starts = [start for start, _ in entries]
    if not starts or starts[0] != 0 or len(set(starts)) < len(starts) or min(size for _, size in entries) < 1:
        raise UsageError(
            "the table of batch sizes cannot be used",
            found=f"{text!r}: " + ", ".join(f"{size} from sample {start}" for start, size in entries[:6]),
            expected="thresholds that begin at 0 and rise, sizes of 1 or more",
        )
    return BatchSizes(tuple(entries))


def _amount(word: str, text: str) -> int:
    match = _NUMBER.fullmatch(word)
    try:
        return int(float(match[1]) * _UNITS[match[2].upper()]) if match else int(word)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{word!r} is not a number", found=repr(text), expected="a number such as 16, 0.1k or 2.5M"
        ) from error
