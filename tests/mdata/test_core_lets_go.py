"""Every native function that works on arrays, texts or files releases the GIL."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.native_calls import masked_rows, orders, rows_of_tokens, tables, texts
from tests.mdata.test_core import stub_signatures

FROM_FILES = {"PooledFile.read", "map_file", "RunMerger.records", "RunMerger.edges", "common_words"}
FROM_NUMPY = {"order.megatron.repeated"}
CALLS = {name for calls in (orders, tables, rows_of_tokens, masked_rows, texts) for name, _ in calls()} | FROM_FILES
# What keeps the GIL, and why it may.
KEEPS = {
    "one small answer": (
        "philox4x32", "punkt_character", "BlendTree.counts", "FilePool.most", "FilePool.num_open",
        "Mersenne.up_to", "Mersenne.integer", "Mersenne.real", "Mersenne.pick", "Mersenne.geometric",
        "KeyedStream.real", "KeyedStream.up_to", "MaskRule.bounds", "WordPiece.words", "WordPiece.classes",
        "BlockShuffle.place", "xxh64", "sha1", "count_below", "text_classes_unicode", "text_classes",
        "NgramIndex.ngrams",
    ),
    "made once": tuple(
        f"{name}.__init__" for name in (
            "Permutation", "BlendTree", "FilePool", "PooledFile", "Mersenne", "Punkt", "MaskVocabulary", "MaskRule",
            "BertForm", "T5Form", "MegatronDraws", "KeyedDraws", "MaskedRows", "KeyedStream", "FimRule",
            "SentencePiece", "TokenStore", "SequenceIndex", "BlockShuffle", "RowRules", "MinHashSigner",
            "RunMerger",
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> dict[str, bool]:
    words = [sys.executable, "-m", "tests.helpers.native_calls"]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=250).stdout)


def test_a_call_that_keeps_the_gil_is_known(seen):
    assert not seen["control"]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_others_run_during_the_call(seen, name):
    assert seen[name]


def test_no_function_is_left_out(seen):
    assert {*(CALLS - FROM_NUMPY), *(name for names in KEEPS.values() for name in names)} == set(stub_signatures())
    assert CALLS | {"control"} == set(seen)
