"""Samples of several fields, not rows of text: many are read at once, into arrays of the caller if there are any."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mdata.errors import UsageError
from mdata.samples.rows import Empty, Sample
from mdata.samples.special_tokens import MaskedVocabulary
from mdata.util.arrays import Int64s
from mdata.util.pickling import PickledByArguments


class FieldSamples(PickledByArguments):
    """What the kinds have in common.

    Attributes:
        vocabulary: ids of special tokens. num_samples: None if endless.
    """

    vocabulary: MaskedVocabulary
    num_samples: int | None

    def sample(self, k: int) -> Sample:
        """Sample k: each field is an int64 array, 0-dimensional for a single number.

        Raises:
            IndexError: a number below 0 or past the end.
        """
        return {name: array[0, ...] for name, array in self.read([k]).items()}

    def read(self, numbers: npt.ArrayLike, out: Sample | None = None) -> Sample:
        """Samples with these numbers, in any order: each field has one more leading dimension.

        Args:
            numbers: integer[n].
            out: arrays to write into, with the shapes and dtype of `allocate(n)`; None: new ones.

        Raises:
            IndexError: a number below 0 or past the end.
            UsageError: `out` does not fit, or a sample is too long (T5 in Megatron's order).
        """
        wanted = np.ascontiguousarray(numbers, np.int64)
        end = self.num_samples
        if wanted.size and (wanted.min() < 0 or (end is not None and wanted.max() >= end)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {end}")
        fields = self.allocate(len(wanted)) if out is None else self.checked(out, len(wanted))
        if len(wanted):
            self._write(wanted, fields)
        return fields

    def allocate(self, n: int, *, empty: Empty = np.empty) -> Sample:
        """Uninitialized arrays for n samples; `empty` makes them."""
        return {name: empty((n, *shape), np.int64) for name, shape in self._shapes().items()}

    def checked(self, out: Sample, n: int) -> Sample:
        """Check that n samples can be written into these arrays; returns them.

        Raises:
            UsageError: they do not fit.
        """
        for name, shape in self._shapes().items():
            array, wanted = out.get(name), (n, *shape)
            fits = array is not None and array.dtype == np.int64 and array.shape == wanted and array.flags.c_contiguous
            if not fits:
                shown = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise UsageError(
                    f"out[{name!r}] cannot take the samples", found=shown, expected=f"int64 {list(wanted)}, contiguous"
                )
        return out

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The fields of one sample, in the order of the C++ core."""
        raise AssertionError("a kind has fields")

    def _write(self, numbers: Int64s, fields: Sample) -> None:
        """Write samples that exist."""
        raise AssertionError("a kind has samples")
