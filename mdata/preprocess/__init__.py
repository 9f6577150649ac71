"""Preprocess: text in, .bin/.idx and a manifest out; the same bytes however the work was split or cut off.

`run` is the way in; `job` is what is known before, `filling` the long part, `resume` what is taken over from
a run that was cut off, `results` and `finish` the end.
"""

from mdata.cores import usable_cores
from mdata.preprocess.estimate import Estimate, estimate
from mdata.preprocess.options import PreprocessOptions
from mdata.preprocess.results import PreprocessResult
from mdata.preprocess.run import preprocess

__all__ = ["Estimate", "PreprocessOptions", "PreprocessResult", "estimate", "preprocess", "usable_cores"]
