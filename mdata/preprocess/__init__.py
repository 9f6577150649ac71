"""Preprocess: text in, .bin/.idx and a manifest out; the same bytes however the work was split."""

from mdata.cores import usable_cores
from mdata.preprocess.options import PreprocessOptions
from mdata.preprocess.run import PreprocessResult, preprocess

__all__ = ["PreprocessOptions", "PreprocessResult", "preprocess", "usable_cores"]
