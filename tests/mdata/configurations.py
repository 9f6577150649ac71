"""Random configurations of every order and kind of sample against the slow twins, by number.

`check(family, number, folder=...)` makes configuration `number` of a family (always the same one), compares all results
of the fast code with the twin, and returns the edge cases it met. As a program it runs many and stops at the first
difference: `python -m tests.mdata.configurations --count 10000 [--families ...] [--first N]`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from mdata.order.megatron_order import MegatronRequest, build
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.samples.base import RowSamples
from mdata.samples.gpt import GptSamples
from mdata.samples.megatron_gpt import MegatronGptSamples
from mdata.samples.packed import PackedSamples, PackingRule
from mdata.samples.rows import empty_rows, finish
from mdata.samples.single_document import DocumentSamples
from tests.helpers.corpora import FileStream, write_pair
from tests.mdata import layouts
from tests.mdata.layouts import Refused
from tests.mdata.masked_configurations import mapping, masked
from tests.reference.gpt_samples import Native, document_sample, megatron_samples, native_sample, packed_sample
from tests.reference.megatron_order import indices
from tests.reference.native_order import native_start

SAMPLES = 12  # of a configuration that are compared, where it has more


def megatron_order(random: Random, _folder: Path) -> set[str]:
    """Document, sample and shuffle index."""
    layout = layouts.draw_layout(random)
    request, met = draw_request(random, layout)
    lengths = np.array(layout.lengths, np.int32)
    wrong = layout.tokens == 0 and request.num_samples is not None
    with Refused(wrong):
        made = build(lengths, request, threads=random.choice((1, 2)))
    if wrong:
        return met | {"refused"}
    documents, samples, shuffle = indices(
        layout.lengths,
        (layout.first, layout.stop),
        wanted=request.num_samples,
        q=layout.length,
        seed=request.seed,
        extra=layout.extra,
        keep=request.keep_partial,
    )
    assert made.documents.tolist() == documents
    assert list(map(tuple, made.samples.tolist())) == samples
    assert made.shuffle.tolist() == shuffle
    return met


def draw_request(random: Random, layout: layouts.Layout) -> tuple[MegatronRequest, set[str]]:
    """A request for a layout, and the edges of both."""
    wanted, met = layouts.draw_wanted(random, layout)
    keep = random.random() < 0.5
    request = MegatronRequest(
        first=layout.first,
        stop=layout.stop,
        sequence_length=layout.length,
        num_samples=wanted,
        seed=layouts.draw_seed(random),
        extra_token=bool(layout.extra),
        keep_partial=keep,
    )
    return request, met | layout.edges | ({"partial kept"} if keep else set())


def megatron_gpt(random: Random, folder: Path) -> set[str]:
    """Samples of Megatron's order."""
    layout = layouts.draw_layout(random)
    request, met = draw_request(random, layout)
    options = layouts.draw_options(random, layout, megatron=True)
    tokens = layouts.draw_tokens(random, layout)
    write_pair(folder / "x", layout.documents, tokens=np.array(tokens, np.int64), code=random.choice((4, 8)))
    wrong = layout.tokens == 0 and request.num_samples is not None
    with Refused(wrong):
        made = MegatronGptSamples(FileStream(folder / "x"), request, options=options)
    if wrong:
        return met | {"refused"}
    wanted = megatron_samples(layout.lengths, tokens, request=request, options=options)
    assert made.num_samples == len(wanted)
    numbers = random.sample(range(len(wanted)), min(SAMPLES, len(wanted)))
    compare(made, {k: wanted[k] for k in numbers})
    return met


def native_order(random: Random, _folder: Path) -> set[str]:
    """First tokens of the native order; one text in ten is so long that its permutation is a network."""
    layout = layouts.draw_layout(random)
    tokens, met = layout.tokens, set(layout.edges)
    if random.random() < 0.1:
        tokens, met = random.choice((10**5, 2**31, 2**40)) * layout.length + random.randint(0, 9), {"network"}
    seed, shuffle = random.choice((0, 1234, 2**64)), random.random() < 0.7
    least = layout.extra + (layout.length if shuffle else 1)
    known = {"extra_token": bool(layout.extra), "shuffle": shuffle}
    with Refused(tokens < least):
        order = StreamOrder(tokens, layout.length, key=OrderKey(seed, "some corpus"), **known)
    if tokens < least:
        return met | {"refused"}
    if not shuffle:
        num_samples = order.num_samples
        assert (num_samples - 1) * layout.length < tokens - layout.extra <= num_samples * layout.length
        last = min(num_samples, 100)
        assert order.starts(np.arange(last)).tolist() == [k * layout.length for k in range(last)]
        return met | {"one pass"}
    numbers = draw_numbers(random, order.samples_per_epoch)
    given = {"tokens": tokens, "length": layout.length, "extra": layout.extra, "seed": seed}
    starts = [native_start(k, corpus_id="some corpus", **given) for k in numbers]
    assert order.starts(numbers).tolist() == [order.start(k) for k in numbers] == starts
    for k, start in zip(numbers, starts, strict=True):
        assert order.sample_at(k // order.samples_per_epoch, start) == k
    return met | {"shuffled"}


def draw_numbers(random: Random, per_epoch: int) -> list[int]:
    """Samples of the first epochs, and of one far away."""
    far = random.choice((2**31, 2**32, 2**40)) + random.randint(-2, 2)
    return [*(random.randrange(3 * per_epoch) for _ in range(SAMPLES - 2)), per_epoch, far]


def native_gpt(random: Random, folder: Path) -> set[str]:
    """Samples of the native order: single ones, many at once, and by the one call for an epoch."""
    layout = layouts.draw_layout(random)
    options, tokens = layouts.draw_options(random, layout, megatron=False), layouts.draw_tokens(random, layout)
    write_pair(folder / "x", layout.documents, tokens=np.array(tokens, np.int64), code=random.choice((4, 8)))
    shuffle, seed = random.random() < 0.7, random.randint(0, 3)
    known = {"extra_token": bool(layout.extra), "shuffle": shuffle, "seed": seed, "options": options}
    wrong = layout.tokens < layout.extra + (layout.length if shuffle else 1)
    met = {"shuffled" if shuffle else "one pass", *layout.edges}
    with Refused(wrong):
        made = GptSamples(FileStream(folder / "x"), (layout.first, layout.stop), **known)
    if wrong:
        return met | {"refused"}
    per_epoch = made.order.samples_per_epoch
    numbers = draw_numbers(random, per_epoch) if shuffle else list(range(made.num_samples))[-SAMPLES:]
    assert shuffle or made.num_samples == -(-(layout.tokens - layout.extra) // layout.length)
    before = sum(layout.lengths[: layout.first])
    told = {"document_lengths": list(map(sum, layout.documents)), "options": options}
    order = Native(seed, made.corpus.id, layout.extra, shuffle)
    span = (before, before + layout.tokens)
    wanted = {k: native_sample(k, tokens, span=span, order=order, **told) for k in numbers}
    compare(made, wanted)
    if shuffle:
        epoch = random.choice(numbers) // per_epoch
        inside = {k: sample for k, sample in wanted.items() if k // per_epoch == epoch}
        rows = made.read(np.array(list(inside)), empty_rows(len(inside), options))
        compare_rows(rows, list(inside.values()), length=options.sequence_length)
    return met


def one_document(random: Random, folder: Path) -> set[str]:
    """One document a row."""
    layout = layouts.draw_layout(random)
    options, tokens = layouts.draw_options(random, layout, megatron=False), layouts.draw_tokens(random, layout)
    write_pair(folder / "x", layout.documents, tokens=np.array(tokens, np.int64))
    first, last = sorted(random.randint(0, len(layout.documents)) for _ in range(2))
    texts = layouts.document_tokens(layout.documents, tokens)[first:last]
    longer, shuffle, seed = random.choice(("cut", "drop")), random.random() < 0.7, random.randint(0, 3)
    most, least = layout.length + layout.extra, min(2, layout.length + layout.extra)
    count = len(texts) if longer == "cut" else sum(least <= len(text) <= most for text in texts)
    met = {longer, "shuffled" if shuffle else "one pass"} | ({"empty document"} if [] in texts else set())
    with Refused(count == 0):
        known = {"seed": seed, "extra_token": bool(layout.extra), "shuffle": shuffle, "longer": longer}
        made = DocumentSamples(FileStream(folder / "x"), (first, last), options=options, **known)
    if count == 0:
        return met | {"refused"}
    assert made.num_samples == (None if shuffle else count)
    numbers = draw_numbers(random, count) if shuffle else list(range(count))[-SAMPLES:]
    order = Native(seed, made.corpus.id, layout.extra, shuffle)
    compare(made, {k: document_sample(k, texts, longer=longer, options=options, order=order) for k in numbers})
    return met


def packed(random: Random, folder: Path) -> set[str]:
    """Documents packed into rows, in windows of a few."""
    layout = layouts.draw_layout(random)
    options = replace(layouts.draw_options(random, layout, megatron=False), position_ids=False, mask_document_ends=True)
    tokens = layouts.draw_tokens(random, layout)
    write_pair(folder / "x", layout.documents, tokens=np.array(tokens, np.int64))
    texts = layouts.document_tokens(layout.documents, tokens)
    first = random.randint(0, len(texts) // 2)
    longer, shuffle, window = random.choice(("cut", "drop")), random.random() < 0.7, random.choice((1, 2, 1000))
    first -= first % window  # windows begin at multiples of their size, whatever the range
    last = random.randint(first, len(texts))
    rule = PackingRule(sequence_length=layout.length, extra_token=bool(layout.extra), longer=longer, window=window)
    most, least = rule.row_length, min(2, rule.row_length)
    fits = any(least <= len(text) and (longer == "cut" or len(text) <= most) for text in texts[first:last])
    met = {longer, "shuffled" if shuffle else "one pass", f"window {window}"}
    with Refused(not fits):
        known = {"options": options, "rule": rule, "seed": 3, "shuffle": shuffle}
        made = PackedSamples(FileStream(folder / "x"), (first, last), **known)
    if not fits:
        return met | {"refused"}
    count = made.samples_per_epoch
    numbers = draw_numbers(random, count) if shuffle else list(range(made.num_samples))[-SAMPLES:]
    order = Native(3, made.corpus.id, layout.extra, shuffle)
    told = {"longer": longer, "options": options, "order": order, "window": window}
    wanted = {k: packed_sample(k, texts[first:last], **told) for k in numbers}
    assert {rows for _, rows in wanted.values()} == {count}
    compare(made, {k: sample for k, (sample, _) in wanted.items()})
    return met


def compare(made: RowSamples, wanted: dict[int, dict]) -> None:
    """Single samples, and all of them at once, are the twin's."""
    for k, sample in wanted.items():
        assert {name: value.tolist() for name, value in made.sample(k).items()} == sample, f"sample {k}"
    rows = empty_rows(len(wanted), made.options)
    gathered = made.gather(np.array(list(wanted), np.int64), rows.text)
    compare_rows(
        finish(rows, gathered, options=made.options), list(wanted.values()), length=made.options.sequence_length
    )


def compare_rows(rows, wanted: list[dict], *, length: int) -> None:
    """Rows read at once are the twin's samples."""
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        array = getattr(rows, name)
        assert array is None or array.tolist() == [sample[name] for sample in wanted], name
    if rows.cu_seqlens is not None:
        starts = {i * length + start for i, sample in enumerate(wanted) for start in sample["cu_seqlens"]}
        assert rows.cu_seqlens.tolist() == sorted(starts | {0})
        assert rows.max_seqlen == max((sample["max_seqlen"] for sample in wanted), default=0)


FAMILIES = {
    "megatron order": megatron_order,
    "megatron gpt": megatron_gpt,
    "native order": native_order,
    "native gpt": native_gpt,
    "one document": one_document,
    "packed": packed,
    "mapping": mapping,
    "masked": masked,
}


def check(family: str, number: int, *, folder: Path) -> set[str]:
    """Compare one configuration with its twin; the edges that it met.

    Raises:
        AssertionError: they differ; a note tells which configuration.
    """
    try:
        return FAMILIES[family](Random(f"{family} {number}"), folder)
    except Exception as error:
        error.add_note(f"configuration {number} of {family!r}")
        raise


def run(family: str, numbers: range) -> Counter[str]:
    """Compare many; how often each edge was met."""
    met: Counter[str] = Counter()
    for start in range(numbers.start, numbers.stop, 500):
        with contextlib.closing(Folder()) as folder:
            for number in range(start, min(start + 500, numbers.stop)):
                met.update(check(family, number, folder=folder.next()))
    return met


class Folder:
    """A folder for each configuration: a pair that is still mapped is not written over."""

    def __init__(self) -> None:
        self._all = tempfile.TemporaryDirectory(prefix="mdata-configurations-")
        self._made = 0

    def next(self) -> Path:
        """A new one."""
        self._made += 1
        path = Path(self._all.name) / str(self._made)
        path.mkdir()
        return path

    def close(self) -> None:
        """Away with all of them."""
        self._all.cleanup()


def main() -> None:
    """Run many of each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    arguments = parser.parse_args()
    for family in arguments.families:
        began = time.process_time()
        met = run(family, range(arguments.first, arguments.first + arguments.count))
        told = ", ".join(f"{name} {count}" for name, count in sorted(met.items()))
        print(f"{family}: {arguments.count} equal in {time.process_time() - began:.0f} s ({told})", flush=True)


if __name__ == "__main__":
    main()
