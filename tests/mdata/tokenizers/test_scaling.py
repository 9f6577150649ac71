"""Loading and using a tokenizer takes work in proportion to its tokens: lines of Python are counted, not seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec
from mdata.tokenizers.engines.libraries import TiktokenEngine
from mdata.tokenizers.registry import load_tokenizer
from tests.mdata.tokenizers.models import BYTES, bpe
from tests.mdata.tokenizers.test_types import MERGES, files
from tests.mdata.tokenizers.types.test_tiktoken import BYTES as RANKS
from tests.mdata.tokenizers.types.test_tiktoken import as_list
from tests.mdata.tokenizers.types.test_wordpiece import ENTRIES, vocabulary
from tests.mdata.tokenizers.visible import definition, token

SMALL = 150
Load = Callable[[Path, Sequence[str]], Tokenizer]


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of Python, and steps of generators, a call takes."""
    count = 0

    def seen(frame: FrameType, event: str, value: object) -> Any:
        nonlocal count
        count += 1
        return seen

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def is_in_proportion(work: Callable[[int], Any], small: int = SMALL) -> bool:
    """Whether the second doubling costs about twice as much more as the first one; of a square it is four times."""
    one, two, four = (lines_run(lambda size=size: work(size)) for size in (small, 2 * small, 4 * small))
    return four - two < 3 * (two - one) + 500


def test_the_measure_can_fail():
    assert is_in_proportion(lambda n: [x + 1 for x in range(n)])
    assert not is_in_proportion(lambda n: [max(y for y in range(x + 1)) for x in range(n)])
    assert not is_in_proportion(lambda n: any(x < 0 for _ in range(n) for x in range(n)))


def huggingface(engine: str, **flags: bool) -> Load:
    def load(folder: Path, names: Sequence[str]) -> Tokenizer:
        first = len(definition()["model"]["vocab"])
        added = tuple(token(first + number, name, **flags) for number, name in enumerate(names))
        (folder / "tokenizer.json").write_text(json.dumps(definition(added=added)))
        return load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(folder), engine=engine))

    return load


def of_two_kinds(folder: Path, names: Sequence[str]) -> Tokenizer:
    """Every other token is special, so that special ids are many runs, and every other is matched after normalizing."""
    first = len(definition()["model"]["vocab"])
    added = tuple(
        token(first + n, name, special=n % 2 == 0, normalized=n % 2 == 1, single_word=n % 3 == 0, lstrip=n % 5 == 0)
        for n, name in enumerate(names)
    )
    (folder / "tokenizer.json").write_text(json.dumps(definition(added=added, normalizer={"type": "NFC"})))
    return load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(folder)))


def gpt2(folder: Path, names: Sequence[str]) -> Tokenizer:
    options = (("special_tokens", list(names)),)
    return load_tokenizer(TokenizerSpec(type="GPT2BPETokenizer", **files(folder, merges=MERGES), options=options))


def bert(folder: Path, names: Sequence[str]) -> Tokenizer:
    path = vocabulary(folder, ENTRIES)
    options = (("special_tokens", list(names)),)
    return load_tokenizer(TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=path, options=options))


def sentencepiece(folder: Path, names: Sequence[str]) -> Tokenizer:
    (folder / "m.model").write_bytes(bpe(["a", "b", " a", " b"], BYTES, byte_fallback=1))
    options = (("legacy", True), ("special_tokens", list(names)))
    spec = TokenizerSpec(type="SentencePieceTokenizer", model=str(folder / "m.model"), options=options)
    return load_tokenizer(spec)


def tik(engine: str) -> Load:
    def load(folder: Path, names: Sequence[str]) -> Tokenizer:
        (folder / "ranks.json").write_bytes(as_list())
        special = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", *names]
        sizes = (("vocab_size", len(RANKS) + len(special)), ("num_special_tokens", len(special)))
        options = (("special_tokens", special), *sizes)
        spec = TokenizerSpec(type="TikTokenizer", model=str(folder / "ranks.json"), options=options, engine=engine)
        return load_tokenizer(spec)

    return load


KINDS: dict[str, Load] = {
    **{f"huggingface {engine}": huggingface(engine) for engine in ("gigatoken", "tiktoken", "tokenizers")},
    "huggingface words": huggingface("auto", single_word=True),
    "huggingface not special": huggingface("auto", special=False, normalized=True),
    "huggingface of two kinds": of_two_kinds,
    "gpt2": gpt2,
    "bert": bert,
    "sentencepiece": sentencepiece,
    "tik gigatoken": tik("gigatoken"),
    "tik tiktoken": tik("tiktoken"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens(tmp_path, kind):
    """Each is loaded, found in a text of its own, counted and named."""

    def use(count: int) -> None:
        names = [f"<tok{number}>" for number in range(count)]
        tokenizer = KINDS[kind](tmp_path, names)
        ids, lengths = tokenizer.encode_batch([f"a {name} b" for name in names])
        assert tokenizer.special_in_text(ids, len(lengths)) in (count, (count + 1) // 2, 0)
        assert set(names) <= tokenizer.special_ids.keys() or "two kinds" in kind or "not special" in kind
        if hasattr(tokenizer, "id_of"):
            assert None not in [tokenizer.id_of(name) for name in names]

    use(10)  # what is made once for the process is not counted
    assert is_in_proportion(use)


def test_only_the_names_in_a_text_are_handed_to_tiktoken():
    names = [f"<tok{number}>" for number in range(50)]
    first = len(definition()["model"]["vocab"])
    added = tuple(token(first + number, name) for number, name in enumerate(names))
    engine = TiktokenEngine(definition(added=added), plain=False)
    library, handed = engine._library, []

    class Counting:
        def encode_to_numpy(self, text: str, *, allowed_special: set[str], **more: Any) -> Any:
            handed.append(len(allowed_special))
            return library.encode_to_numpy(text, allowed_special=allowed_special, **more)

    engine._library = Counting()
    found = engine.encode(["a", names[7], names[1] + names[1] + names[2]])
    assert handed == [0, 1, 2]
    assert [ids.tolist() for ids in found][1:] == [[first + 7], [first + 1, first + 1, first + 2]]
