"""Tests of native code with an extension built with AddressSanitizer and UndefinedBehaviorSanitizer.

`python -m tests.helpers.sanitized build/core-sanitized --jobs 2` (`make core-sanitized`) runs pytest on the files
below, which give the extension wrong and hostile arguments, with that folder's mdata._core in place of the installed
one. The sanitizer then also manages Python's and numpy's memory, so reading one byte past an array ends the run. Tests
that fork beside threads, or map files that are truncated, are left out: under the sanitizer they may hang.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FOLDER = "MDATA_SANITIZED"
TESTS = (
    "tests/helpers/test_sanitized.py",
    "tests/mdata/test_core.py",
    "tests/mdata/dedup/test_runs.py",
    "tests/mdata/cleaning/test_decontaminate.py",
    "tests/mdata/cleaning/test_rules.py",
    "tests/mdata/dedup/test_substrings.py",
    "tests/mdata/indexed/test_gather.py",
    "tests/mdata/indexed/test_reader.py",
    "tests/mdata/order/test_megatron_order.py",
    "tests/mdata/order/test_permutation.py",
    "tests/mdata/mixing/test_megatron_blend.py",
    "tests/mdata/mixing/test_native_blend.py",
    "tests/mdata/samples/test_fim.py",
    "tests/mdata/samples/test_sentence_mapping.py",
    "tests/mdata/samples/test_masked.py",
    "tests/mdata/samples/test_packed.py",
    "tests/mdata/samples/test_shuffle_block.py",
    "tests/mdata/sentences/test_splitter.py",
    "tests/mdata/tokenizers/sentencepiece/test_sentencepiece_bpe.py",
    "tests/mdata/tokenizers/types/test_rwkv.py",
    "tests/mdata/tokenizers/wordpiece/test_wordpiece_engine.py",
)
# They call the same code as their neighbours, for longer than the sanitizers leave time.
TOO_LONG = frozenset(
    (
        "test_a_phrase_of_many_items_takes_no_quadratic_time",
        "test_a_run_that_fails_anywhere_continues",
        "test_a_text_that_repeats_itself_endlessly_takes_linear_time",
        "test_any_vocabulary",
        "test_bytes_do_not_depend_on_workers",
        "test_every_code_point_in_company",
        "test_no_text_takes_quadratic_time",
        "test_shuffled_ranges_equal_the_twin",
        "test_blocks_cross_shards_and_threads_change_nothing",
        "test_every_code_point",
        "test_large_blocks_and_many_of_them_equal_the_twin",
        "test_words_are_forgotten_without_a_trace",
        "test_ids_are_those_of_the_library",
        "test_an_epoch_reads_the_twins_stream_once",
        "test_code_points_in_company",
        "test_batches_of_any_epochs_equal_single_samples",
        "test_time_grows_with_the_text_alone",
        "test_65536_components_stay_near_their_shares",
        "test_raw_oracles",
        "test_samples_are_the_twins",
        "test_words_are_those_of_the_library_and_of_the_twin",
        "test_a_folder_of_the_form_gets_the_fast_engine",
        "test_ids_are_the_library_s_and_the_twin_s",
        "test_every_prefix_equals_the_twin_and_stays_near_its_share",
        "test_pieces_and_their_inverse",
        "test_the_arrays_are_megatrons",
        "test_memory_is_that_of_the_arrays",
        "test_megatrons_rows_are_the_twins",
        "test_texts_and_words_of_any_length",
        "test_many_components_equal_the_twin",
    )
)
# What an instrumented library calls when it finds something.
MARKS = (b"__asan_report_load", b"__ubsan_handle_")


def main() -> int:
    """Run pytest under the sanitizers; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the extension that was built under the sanitizers")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    arguments, more = parser.parse_known_args()
    words = ["-m", "pytest", "-p", __spec__.name, "-n", str(arguments.jobs), "--dist", "loadfile", *(more or TESTS)]
    return subprocess.run([sys.executable, *words], env={**os.environ, **environment(arguments.folder)}).returncode


def environment(folder: Path) -> dict[str, str]:
    """The variables under which a Python that was built without sanitizers can load a library built with them."""
    libraries = [_library(name) for name in ("libasan.so", "libstdc++.so")]
    return {
        FOLDER: str(folder.resolve()),
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONMALLOC": "malloc",  # each object has its own block, with guards around it
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _library(name: str) -> str:
    """The path of the compiler's runtime library."""
    words = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return str(Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()).resolve())


def pytest_configure(config: pytest.Config) -> None:
    """Replace the installed extension by the sanitized one, before anything imports it."""
    assert "mdata._core" not in sys.modules, "the other extension is loaded already"
    (path,) = Path(os.environ[FOLDER]).glob("_core*.so")
    assert all(mark in path.read_bytes() for mark in MARKS), f"{path} was built without the sanitizers"
    spec = spec_from_file_location("mdata._core", path)
    assert spec is not None and spec.loader is not None, path
    module = module_from_spec(spec)
    sys.modules["mdata._core"] = module
    spec.loader.exec_module(module)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that take too long."""
    long = [item for item in items if getattr(item, "originalname", item.name) in TOO_LONG]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


if __name__ == "__main__":
    sys.exit(main())
