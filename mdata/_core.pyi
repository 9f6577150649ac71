"""The Python interface of the C++ core (mdata_cpp/). tests/mdata/test_core.py compares this page with the built module.

Arrays must be C-contiguous, of one dimension and of exactly the dtype named; results are new arrays. Everything here
is pure and releases the GIL while it works on arrays. Users call the shells: `mdata.order`, `mdata.blend`,
`mdata.indexed`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

def philox4x32(counter: tuple[int, int, int, int] | list[int], key: tuple[int, int] | list[int]) -> list[int]:
    """Philox4x32-10 of one counter (four 32-bit words) under one key (two words): four random words."""

class Permutation:
    """A keyed permutation of [0, n); n in [1, 2^63], key of 128 bits. See mdata_cpp/permutation.hpp.

    Raises:
        ValueError: n is out of range.
    """

    def __init__(self, n: int, key_low: int, key_high: int) -> None: ...
    def forward(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[k] positions in [0, n) -> int64[k] values. IndexError for an entry outside."""

    def inverse(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[k] values in [0, n) -> int64[k], the positions that `forward` maps to them. IndexError outside."""

def shuffled_range(first: int, n: int, key_low: int, key_high: int) -> NDArray[np.int64]:
    """[first, first + n) in the order of a Permutation of n, int64[n]. ValueError: n is below 1."""

class BlendTree:
    """A Huffman tree over integer weights that assigns samples to components. See mdata_cpp/blend.hpp.

    Sample numbers are in [0, 2^62]; a result above raises OverflowError.

    Raises:
        ValueError: no weight, or a weight of 0.
        OverflowError: the weights sum to more than 2^62.
    """

    def __init__(self, weights: list[int]) -> None: ...
    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64[k] samples of the blend -> (component, sample inside the component), int64[k] each."""

    def inverse(self, components: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Inverse of `locate`: int64[k] components and their samples -> int64[k] samples of the blend."""

    def counts(self, num_samples: int) -> list[int]:
        """How many of the blend's first `num_samples` samples each component gives."""

def map_file(path: bytes, identity: tuple[int, int, int, int] | None = None) -> NDArray[np.uint8]:
    """A file's bytes as a read-only map without an open descriptor; empty for an empty file.

    Raises:
        OSError: it cannot be mapped; ESTALE: the file has another identity, as for `PooledFile`.
    """

class FilePool:
    """Files with a limit on how many are open at once (0: a quarter of the limit of descriptors).
    mdata_cpp/file_pool.hpp.
    """

    def __init__(self, most: int = 0) -> None: ...
    def most(self) -> int:
        """How many may be open now."""

    def num_open(self) -> int:
        """How many are."""

class PooledFile:
    """A file that is opened when it is read, and closed when its pool is full of more recently read ones.

    Args:
        pool: the pool.
        path: its name.
        identity: (device, inode, size, time of change in ns), which the file must have whenever it is opened.
    """

    def __init__(self, pool: FilePool, path: bytes, identity: tuple[int, int, int, int]) -> None: ...
    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on; fewer at the end of the file. The GIL is released.

        Raises:
            OSError: it cannot be read; ESTALE: another file is at the path. ValueError: a start before the file.
        """

def pointers_from_lengths(lengths: NDArray[np.int32], item_size: int, start: int) -> tuple[NDArray[np.int64], int]:
    """Byte offsets of int32[k] contiguous sequences from byte `start` on, and the end of the last.

    Raises:
        ValueError: a negative length.
        OverflowError: an offset above 2^63 - 1.
    """

def check_sequences(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_size: int, bin_size: int, expected: int
) -> tuple[str, int, bool, int, int]:
    """Check one block of an index: (fault, entry, contiguous, next, bytes).

    `fault` is "" or the name of the first check that failed (length_negative, pointer_negative, pointer_unaligned,
    pointer_past_end), at `entry` of the block. `expected` is the byte at which the block begins if sequences are
    contiguous; `next` is passed for the next block, `bytes` the sum over the block's sequences.
    """

def check_boundaries(boundaries: NDArray[np.int64], num_sequences: int, previous: int) -> tuple[str, int]:
    """Check one block of document boundaries: (fault, entry); `previous` is -1 at the start of the table.

    `fault` is "" or boundary_start, boundary_decreases or boundary_past_end.
    """

class Mersenne:
    """MT19937 seeded with one number, as numpy's RandomState(seed). See mdata_cpp/mersenne.hpp."""

    def __init__(self, seed: int) -> None: ...
    def up_to(self, most: int) -> int:
        """A number in [0, most] by numpy's legacy rule; 0 draws nothing."""

    def integer(self, low: int, high: int) -> int:
        """A number in [low, high), as RandomState.randint. ValueError for an empty range."""

    def real(self) -> float:
        """A number in [0, 1), as RandomState.random_sample."""

    def pick(self, bounds: NDArray[np.float64]) -> int:
        """An index below n, by cumulative probabilities [n], as RandomState.choice."""

    def geometric(self, p: float) -> int:
        """Trials until the first success, as RandomState.geometric. ValueError for p outside (0, 1/3)."""

    def shuffle(self, values: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint32]) -> None:
        """Shuffle [n] numbers in place, as RandomState.shuffle does."""

    def swap_onwards(self, values: NDArray[np.int64]) -> None:
        """Swap each of [n] positions with one at or after it, in place: torch.randperm for 0, 1, 2 ..."""

def pack_documents(
    lengths: NDArray[np.int64], row_length: int, window: int, overlap: int = 0, least: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Pack int64[n] documents, `window` of them at a time, into rows by best fit decreasing. See packing.hpp.

    Args:
        lengths: tokens of each document.
        row_length: tokens of a row.
        window: documents that are fitted together.
        overlap: tokens that a row of a longer document shares with the previous one.
        least: tokens of a piece; shorter ones are left out.

    Returns:
        int64[r] running count of pieces after each row; of each piece its document int64[p], its first token in the
        document int64[p] and its tokens int32[p].

    Raises:
        ValueError: a row length below 1 or above 2^26, a window below 1, a negative length, an overlap or a least piece
            outside a row.
    """

def fill_blend(
    weights: NDArray[np.float64],
    components: NDArray[np.int16] | NDArray[np.int32],
    samples: NDArray[np.int64],
) -> None:
    """Fill in Megatron's weighted blend: the component of sample t, and which of its samples; [t] each.

    The component whose weights[i] * max(t, 1) - (its samples so far) is largest, the lowest among equals; weights as
    given. See megatron_blend.hpp.

    Raises:
        ValueError: no weights, one that is not finite, arrays that differ in size. OverflowError: more components than
            the type of `components` has numbers.
    """

def fill_blend_once(
    sizes: NDArray[np.int64],
    components: NDArray[np.int16] | NDArray[np.int32],
    samples: NDArray[np.int64],
) -> None:
    """Fill in Megatron's exhaustive blend: sizes are weights, and each component gives all of its samples once.

    Raises:
        ValueError, OverflowError: as `fill_blend`; a negative size; arrays whose size is not the number of samples.
    """

def fill_sample_index(
    lengths: NDArray[np.int32],
    order: NDArray[np.int32] | NDArray[np.int64],
    sequence_length: int,
    extra: int,
    threads: int,
    rows: NDArray[np.int32] | NDArray[np.int64],
) -> None:
    """Fill in where samples begin: int32[n] lengths, [d] document numbers, [2 k + 2] rows. See megatron_order.hpp.

    Row k is (position in `order`, offset in that document) of token k * sequence_length; row 0 is (0, 0). Rows of
    samples that end after the last document are not changed. Rows are int64 if the order is.

    Raises:
        ValueError: a sequence length below 1, extra that is not 0 or 1, rows that are not pairs.
        IndexError: a document number outside the lengths.
    """

class Punkt:
    """Sentence splitting over the tables of a language. See mdata_cpp/punkt.hpp and `mdata.sentences`.

    Args:
        abbreviations, starters: words.
        collocations: pairs of words.
        contexts: word -> sum of bits, at most 127.
        keep_newlines: white space between sentences stays at the end of the first.
        slice_chars: texts are first divided every this many characters.

    Raises:
        TypeError: a word is not a str.
        ValueError: a collocation is not a pair, or slice_chars is 0.
    """

    def __init__(
        self,
        abbreviations: Iterable[str],
        collocations: Iterable[tuple[str, str]],
        contexts: dict[str, int],
        starters: Iterable[str],
        keep_newlines: bool,
        slice_chars: int,
    ) -> None: ...
    def split(self, texts: list[str], newer: dict[int, tuple[int, str]]) -> tuple[list[str], list[int]] | None:
        """All sentences, and their running count after each text; lone surrogates are accepted.

        `newer` tells flags and lower case of code points that the table does not know; None when one that decides is
        not among them. Raises TypeError for a text that is not a str.
        """

def punkt_character(code: int) -> tuple[int, int]:
    """The table's entry of a code point: flags, and the offset to its lower case. IndexError above 0x10FFFF."""

def megatron_mapping(
    boundaries: NDArray[np.int64],
    sizes: NDArray[np.int32],
    longest: int,
    short_ratio: int,
    least_sentences: int,
    epochs: int,
    limit: int,
    seed: int,
) -> NDArray[np.uint32] | NDArray[np.uint64]:
    """Megatron's mapping of sentences to samples: [rows, 3] of first sentence, one past the last, target length.

    int64[d + 1] first sentences of documents, int32[s] sizes of all sentences. Whole epochs until there are `limit`
    rows, `epochs` at most, shuffled. Rows are uint64 from 2^32 sentences on. See mapping.hpp.

    Raises:
        ValueError: a target (`longest`) below 2 or above 2^31 - 1, samples without sentences.
        IndexError: a document outside the sentences.
    """

def keyed_mapping(
    boundaries: NDArray[np.int64],
    sizes: NDArray[np.int32],
    longest: int,
    short_ratio: int,
    least_sentences: int,
    key_low: int,
    key_high: int,
    first_document: int,
) -> NDArray[np.uint32] | NDArray[np.uint64]:
    """One epoch in file order, with targets drawn separately for each document; see `megatron_mapping`.

    The first boundary is that of document number `first_document`: mapping in parts gives the same as mapping at once.
    """

class MaskVocabulary:
    """The facts about a tokenizer for masking: uint8[k] `continues` is 1 if an id continues a word; int64[n] `ids`.

    Raises:
        ValueError: no ids.
    """

    def __init__(self, cls: int, sep: int, mask: int, continues: NDArray[np.uint8], ids: NDArray[np.int64]) -> None: ...

class MaskRule:
    """How tokens are chosen for masking. See mdata_cpp/masking.hpp.

    Raises:
        ValueError: a probability outside (0, 1), n-grams outside 1 to 65536, `geometric` and `permute`.
    """

    def __init__(
        self, probability: float, most_ngram: int, whole_words: bool, longer: bool, geometric: bool, permute: bool
    ) -> None: ...
    def bounds(self) -> NDArray[np.float64]:
        """float64[most_ngram]: running sums of the probabilities of lengths 1, 2, ..."""

class BertForm:
    """The form of a BERT sample: its length, whether it has two texts, the padding, and how padding is recognized.

    Raises:
        ValueError: a length below 5.
    """

    def __init__(self, length: int, head: bool, pad: int, by_value: bool) -> None: ...

class T5Form:
    """The form of a T5 sample; int64[n] sentinels.

    Raises:
        ValueError: lengths below 4 and 1.
    """

    def __init__(
        self,
        encoder_length: int,
        decoder_length: int,
        bos: int,
        eos: int,
        sentinels: NDArray[np.int64],
        pad: int,
        by_value: bool,
    ) -> None: ...

class MegatronDraws:
    """Draws of sample k from MT19937(seed + k)."""

    def __init__(self, seed: int) -> None: ...

class KeyedDraws:
    """Draws of sample k from its own stream under a key. See mdata_cpp/keyed.hpp."""

    def __init__(self, key_low: int, key_high: int) -> None: ...

class MaskedRows:
    """Samples to build, with their text: int64[n] numbers, targets, and ends of each in int32[s] sizes of sentences,
    whose int64[t] tokens are contiguous.

    Raises:
        ValueError: arrays that do not fit each other.
    """

    def __init__(
        self,
        numbers: NDArray[np.int64],
        targets: NDArray[np.int64],
        ends: NDArray[np.int64],
        sizes: NDArray[np.int32],
        tokens: NDArray[np.int64],
    ) -> None: ...

def bert_samples(
    form: BertForm,
    vocabulary: MaskVocabulary,
    rule: MaskRule,
    draws: MegatronDraws | KeyedDraws,
    rows: MaskedRows,
    fields: list[NDArray[np.int64]],
) -> None:
    """Fill int64 text, types, labels [n, length], is_random [n], padding_mask, loss_mask [n, length], truncated [n].

    Raises:
        TypeError, ValueError: a field of another type, shape or number; a target that does not fit; one sentence for a
            pair.
    """

def t5_samples(
    form: T5Form,
    vocabulary: MaskVocabulary,
    rule: MaskRule,
    draws: MegatronDraws | KeyedDraws,
    rows: MaskedRows,
    fields: list[NDArray[np.int64]],
) -> tuple[int, int, int] | None:
    """Fill text_enc, text_dec, labels, loss_mask, truncated, enc_mask, dec_mask: lengths of encoder or decoder, int64.

    Returns None, or (row, spans, cells of the decoder) of the first that does not fit, where it stopped. Raises as
    `bert_samples`.
    """

class KeyedStream:
    """The draws of one number under a key. See mdata_cpp/keyed.hpp and draws.hpp."""

    def __init__(self, key_low: int, key_high: int, number: int) -> None: ...
    def real(self) -> float:
        """In [0, 1), of 53 bits."""

    def up_to(self, most: int) -> int:
        """In [0, most]; 0 draws nothing."""

class FimRule:
    """How rows are rearranged. See mdata_cpp/fim.hpp.

    `ids`: prefix, middle, suffix, end of a document. `untouched`: a text that begins so stays as it is; empty: none.

    Raises:
        ValueError: a wrong number of ids.
    """

    def __init__(
        self,
        ids: list[int],
        split: int | None,
        untouched: list[int],
        rate: float,
        spm_rate: float,
        fragment_rate: float,
    ) -> None: ...

def fim_rows(
    rule: FimRule,
    key: tuple[int, int],
    numbers: NDArray[np.int64],
    text: NDArray[np.int64],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    limit: int,
    fill: int,
) -> NDArray[np.int64]:
    """Rearrange in place the first counts[i] tokens of row places[i] of text[m, w], by the draws of sample numbers[i].

    At most `limit` tokens stay, followed by `fill`. Returns their numbers, int64[n].

    Raises:
        ValueError, IndexError: arrays that do not fit each other; no such row.
    """

class WordPiece:
    """WordPiece in BERT's form, with the ids of the `tokenizers` library; immutable. See mdata_cpp/wordpiece.hpp.

    Args:
        vocabulary: entry -> id, ids not negative.
        added: tokens that are cut out of the raw text first, the longest match -> id; -1: found, but left as text.
        unknown: the id of a word that entries cannot cover.
        prefix: of entries that continue a word.
        most_chars: of a word; longer ones are unknown.
        treatment: whether texts are cleaned, CJK is separated, accents are dropped, letters are lowercased.

    Raises:
        ValueError: a negative id.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        added: dict[str, int],
        unknown: int,
        prefix: str,
        most_chars: int,
        treatment: tuple[bool, bool, bool, bool],
    ) -> None: ...
    def encode(
        self, texts: list[str], before: list[int], after: list[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts with `before` and `after` around each, the number of ids of each, and the texts left
        out.

        Texts left out have no ids, and nothing around them: they contain a code point that Unicode editions in use
        treat differently. UnicodeEncodeError for a lone surrogate.
        """

    def words(self, text: str) -> list[str] | None:
        """The words that are looked up, ignoring added tokens; None for a text that is left out."""

    @staticmethod
    def classes() -> dict[str, list[tuple[int, int]]]:
        """The classes of code points, as ranges with both ends: dropped, blank, cjk, accent, punctuation,
        space_in_pretokenizer, and unsettled.
        """

class GreedyTrie:
    """From the left, the longest entry that the UTF-8 of a text goes on with; immutable.

    Args:
        ids: entry -> id; every single byte must be an entry.

    Raises:
        ValueError: a byte has no entry.
    """

    def __init__(self, ids: dict[bytes, int]) -> None: ...
    def encode(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of all texts, and the number of ids of each. UnicodeEncodeError for a lone surrogate."""

class SentencePiece:
    """BPE of a SentencePiece model. See mdata_cpp/sentencepiece.hpp.

    Threads may encode at the same time; each has a word cache of its own, in bounded memory.

    Args:
        pieces, scores, kinds: of each id its text (blanks as U+2581), score, and kind as in the model file (1 to 6).
        charsmap: compiled rules of normalization; may be empty.
        add_dummy_prefix, remove_extra_whitespaces, whitespace_as_suffix: as in the model file.

    Raises:
        UnicodeEncodeError: a lone surrogate in a piece.
        ValueError: lists of different lengths, an empty or an unused piece, missing byte pieces, damaged rules.
    """

    def __init__(
        self,
        pieces: list[str],
        scores: NDArray[np.float32],
        kinds: bytes,
        charsmap: bytes,
        add_dummy_prefix: bool,
        remove_extra_whitespaces: bool,
        whitespace_as_suffix: bool,
    ) -> None: ...
    def encode(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The concatenated ids of all texts, and the number of ids of each.

        Raises:
            TypeError: a text is not a str.
            UnicodeEncodeError: a lone surrogate in a text.
        """

class TokenStore:
    """The tokens of one corpus, read many rows at once. See mdata_cpp/gather.hpp.

    Args:
        dtype: "uint8", "int8", "uint16", "int16", "int32" or "int64".
        shards: (the bytes of a .bin or None, its file if there are no bytes, number of tokens).

    Raises:
        ValueError: another type, fewer bytes than tokens, neither bytes nor a file.
        OverflowError: more than 2^60 tokens.
    """

    def __init__(self, dtype: str, shards: list[tuple[NDArray[np.uint8] | None, PooledFile | None, int]]) -> None: ...
    def gather(
        self,
        first: NDArray[np.int64],
        count: NDArray[np.int64],
        ends: NDArray[np.int64] | None,
        places: NDArray[np.int64] | None,
        out: NDArray[np.int64],
        fill: int,
        threads: int,
    ) -> tuple[int, int, int] | None:
        """Runs of tokens into the rows of out, int64[m, width]: runs r = [first[r], first[r] + count[r]).

        Row i has the runs up to ends[i] (None: one run a row) and goes to row places[i], which differ (None: to row i);
        `fill` stands behind its runs. None, or what a file did not give: (shard, byte, the system's error or 0 for the
        end of the file); rows are then half read.

        Raises:
            IndexError: a run outside the tokens, a position outside the rows. ValueError: runs longer than a row,
            arrays that do not fit each other. Nothing is read then.
        """

class SequenceIndex:
    """Where sequences and documents lie in the tokens of a corpus. See mdata_cpp/sequences.hpp.

    Every method raises LookupError (shard, table, entry) for an impossible entry, IndexError for a number out of range.

    Args:
        item_size: bytes of a token.
        shards: the tables of each .idx as bytes, kept alive: int32 lengths, int64 pointers, int64 boundaries; and the
            number of tokens.
    """

    def __init__(
        self,
        item_size: int,
        shards: list[tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], int]],
    ) -> None: ...
    def cuts(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Where documents begin inside of tokens (start, start + count): row i has the places up to ends[i]."""

    def pieces(
        self, order: NDArray[np.int32] | NDArray[np.int64], spans: NDArray[np.int64], extra: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Runs of samples [d0, o0, d1, o1] in sequences `order`: (ends, first, count), as `gather` takes them."""

    def documents(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First token and number of tokens of each document."""

    def odd_sequences(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.uint8]:
        """For each token of the runs, one after another: 1 where its sequence has an odd number in its document."""

class BlockShuffle:
    """Sequences permuted within fixed blocks of a range, computed. See mdata_cpp/block_shuffle.hpp.

    Tokens are counted as the store does, in the file and in the permuted stream; keys are those of an epoch. Every
    method raises LookupError as `SequenceIndex`, IndexError for tokens or a sequence outside the range.

    Args:
        index: the positions of sequences. first, last: the range. block: sequences of a block, up to 2^20.
    """

    def __init__(self, index: SequenceIndex, first: int, last: int, block: int) -> None: ...
    def pieces(
        self, low: int, high: int, starts: NDArray[np.int64], counts: NDArray[np.int64], inputs: int, threads: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Runs (ends, first, count) of rows of the permuted stream, one a sequence; where they begin inside the first
        `inputs` tokens of each row, as `SequenceIndex.cuts` (ends, places)."""

    def place(self, low: int, high: int, sequence: int) -> tuple[int, int]:
        """Where the permuted stream has the first token of a sequence, and how many tokens it has: not 0."""

class RowRules:
    """How rows are finished; ids are None where they do not matter. See mdata_cpp/rows.hpp.

    Args:
        pad: tokens equal to it are padding and become 0, as in Megatron; None: padding is known by position.
        eod: the end of a document.
        mask_eod: no loss where it is the input.
        restart_at_eod: positions restart after it.
        apart: no loss where the next token is after a cut.
    """

    def __init__(
        self, pad: int | None, eod: int | None, mask_eod: bool, restart_at_eod: bool, apart: bool = False
    ) -> None: ...

def finish_rows(
    text: NDArray[np.int64],
    counts: NDArray[np.int64],
    cuts: tuple[NDArray[np.int64], NDArray[np.int32]] | None,
    loss: NDArray[np.float32] | None,
    positions: NDArray[np.int64] | None,
    rules: RowRules,
) -> None:
    """Loss masks and positions, [n, S] each, of rows text[n, S + 1] of which counts[i] tokens are real.

    Positions restart at the cuts. Raises ValueError for arrays that do not fit each other.
    """

def read_native(
    store: TokenStore,
    index: SequenceIndex | None,
    permutation: Permutation,
    samples: NDArray[np.int64],
    epoch: tuple[int, int, int],
    rows: tuple[NDArray[np.int64], NDArray[np.float32] | None, NDArray[np.int64] | None],
    rules: RowRules,
    threads: int,
    blocks: BlockShuffle | None = None,
    blocks_key: tuple[int, int] = (0, 0),
) -> tuple[tuple[int, int, int] | None, tuple[NDArray[np.int32], int] | None]:
    """Samples of one epoch of the native order into rows (text, loss, positions): all of the above in one call.

    epoch: (its first sample, the token at which places begin, tokens a sample). blocks: permute sequences by the key of
    the epoch; documents kept apart are then sequences. (fault as in `gather`, the result of `cumulative_lengths` if
    there is an index).

    Raises:
        IndexError: a sample of another epoch, or tokens outside. LookupError: as `SequenceIndex`.
    """

def cumulative_lengths(
    ends: NDArray[np.int64], places: NDArray[np.int32], inputs: int
) -> tuple[NDArray[np.int32], int]:
    """Rows of so many inputs laid end to end, with the cuts of `SequenceIndex.cuts`: (cu_seqlens, longest document).

    cu_seqlens is where documents begin, then the end; empty documents are left out.

    Raises:
        OverflowError: more than 2^31 - 1 tokens. ValueError: cuts that are not ascending positions in their row.
    """

class MinHashSigner:
    """MinHash signatures of the n-grams of texts; see mdata_cpp/minhash.hpp. Immutable.

    Args:
        a, b: of each permutation (a x + b mod 2^64) mod (2^61 - 1), band by band.
        rows: permutations of a band. ngram: units of an n-gram.
        unit: "words" or "characters" of the normal form; "given": words that the text has between single blanks; "raw":
            bytes of the text, its sets being of code points without the last n-gram, as Megatron's are.
        hash: of an n-gram: "xxhash64", "sha1-64", or "sha1-32", with which signatures have 32 bits; "murmur3", for raw
            bytes alone: the smallest of -1 and the signed hashes by each of the seeds `a`.

    Raises:
        ValueError: bands of unequal size, or none of either, another unit or hash, or raw without murmur3.
    """

    def __init__(
        self,
        a: NDArray[np.uint64],
        b: NDArray[np.uint64],
        rows: int,
        ngram: int,
        unit: str = "words",
        hash: str = "xxhash64",
    ) -> None: ...
    def sign(self, texts: list[str]) -> tuple[bytes, NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint8]]:
        """(normal forms one after the other, where each ends, keys [n, bands], whether there is an n-gram).

        The keys of a text without an n-gram mean nothing. Raises UnicodeEncodeError for a lone surrogate.
        """

    def minima(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The signature of hashes of n-grams. Raises ValueError if there are none."""

    def ngram_sets(self, texts: list[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """(the sorted distinct hashes of the n-grams of each text, one after the other, where each ends)."""

class RunMerger:
    """The records of sorted runs in files, in order, with a bounded number of them in memory.

    Args:
        slices: of files: descriptor, byte of the first record, records, what is added to the numbers of documents.
        words: of a record, 2 or 3: a key of one or two words, then the number of a document.
        buffer_bytes: of each slice.

    Raises:
        OSError: a file cannot be read. ValueError: a file ends too early, or is not sorted; also in the calls below.
    """

    def __init__(self, slices: Sequence[tuple[int, int, int, int]], words: int, buffer_bytes: int) -> None: ...
    def records(self, limit: int) -> NDArray[np.uint64]:
        """[n, words]: the next records, at most `limit`; none at the end."""

    def edges(self, limit: int, chain: bool) -> NDArray[np.uint64]:
        """[n, 2]: for each record whose key an earlier one has, (number of the first with this key, its own number).

        With `chain` also (number of the one before, its own), unless that is the first. About `limit` pairs; none at
        the end.
        """

def sort_records(records: NDArray[np.uint64]) -> None:
    """Sort records in place: [n, 2] or [n, 3], one or two words of key and a number."""

def count_below(slice: tuple[int, int, int, int], words: int, key: int) -> int:
    """How many records of a slice (see `RunMerger`) have a first word below `key`."""

def common_words(sets: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """How many words two sorted sets in files have in common, for each row of [n, 6].

    Args:
        sets: descriptor, byte and number of words of the one set, then of the other.

    Raises:
        OSError: a file cannot be read. ValueError: a file ends too early.
    """

def join_groups(parents: NDArray[np.int64], edges: NDArray[np.uint64]) -> None:
    """Join the groups of both ends of each edge, in place; the smallest number becomes the root.

    Raises:
        IndexError: an edge names a number that has no parent.
    """

def flatten_groups(parents: NDArray[np.int64]) -> None:
    """Replace each parent by the root of its group, in place. Raises IndexError for a parent after its child."""

def suffix_array(text: bytes) -> NDArray[np.int32]:
    """The positions of a text in the order of what begins there. Raises ValueError for 2^31 - 1 bytes or more."""

def repeated_ranges(text: bytes, ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """[n, 2]: ranges of bytes in substrings of `length` bytes that repeat earlier ones; rising, apart.

    Of equal substrings all bytes are in a range but those of the earliest, which a later one may overlap.

    Args:
        ends: of the documents, one after the other; substrings lie inside one of them.

    Raises:
        ValueError: ends outside the text or not rising, length 0, or 2^31 - 1 bytes or more.
    """

def sha1(data: bytes, size: int) -> int:
    """The first `size` bytes of SHA-1, at most 8, as a little-endian number."""

def xxh64(data: bytes) -> int:
    """XXH64 with seed 0."""

def text_classes_unicode() -> str:
    """The edition of Unicode that the rules on text go by."""

def text_classes() -> NDArray[np.uint8]:
    """uint8[0x110000]: the classes of each code point, see mdata_cpp/text_classes.hpp."""

def word_spans(text: str) -> NDArray[np.int64]:
    """[n, 2]: the [begin, end) of each word in the UTF-8 of a text. Raises UnicodeEncodeError for a lone surrogate."""

def gopher_measures(
    texts: list[str], stop_words: list[str], words: list[NDArray[np.int64]] | None = None
) -> NDArray[np.float64]:
    """[n, 8]: words, their mean length; hashes, ellipses for each word; shares of lines with a bullet, with an ellipsis
    at the end; share of words with a letter; different stop words.

    Args:
        words: those of each text in place of our own, as [begin, end) in bytes.

    Raises:
        ValueError: not one array [m, 2] for each text. IndexError: a word is outside of its text.
    """

def repetition_measures(texts: list[str], words: list[NDArray[np.int64]] | None = None) -> NDArray[np.float64]:
    """[n, 13]: shares of repeated paragraphs, their characters, lines, their characters; of the characters of the most
    frequent 2- to 4-gram of words; of those of repeated 5- to 10-grams. `words`: as above.
    """

def fineweb_measures(
    texts: list[str], short_line: int, words: list[NDArray[np.int64]] | None = None
) -> NDArray[np.float64]:
    """[n, 5]: lines; shares of those that end in a stop mark, and of short ones; share of characters in repeated lines;
    newlines for each word. `words`: as above.
    """

def c4_lines(
    texts: list[str],
    citations: bool,
    stop_mark: bool,
    min_sentences: int,
    min_line_words: int,
    max_word_characters: int,
    lorem_ipsum: bool,
    javascript: bool,
    curly_bracket: bool,
    policy: bool,
) -> tuple[NDArray[np.uint8], list[str]]:
    """(0: kept, 1: lorem ipsum, 2: a bracket, 3: too few sentences; the lines that stay) of each text."""

def third_longest_lines(texts: list[str]) -> NDArray[np.int64]:
    """int64[n]: characters of the third longest line of each text; 0: it has fewer lines."""

def word_counts(texts: list[str]) -> NDArray[np.int64]:
    """int64[n]: words of each text that are not symbols alone."""

def collapsed(texts: list[str]) -> list[str]:
    """The texts with runs of blanks, and newlines after a letter or digit, as one blank."""

def doubtful_lines(texts: list[str]) -> NDArray[np.int64]:
    """[m, 4]: runs of lines that ftfy may change: the text, [begin, end) in characters, whether "<" comes before."""

class NgramIndex:
    """The word n-grams of test items; see mdata_cpp/ngram_match.hpp. Immutable.

    Args:
        items: texts. most: words of an n-gram. least: of an item that is one n-gram, as it has fewer than `most`.

    Raises:
        ValueError: not 1 <= least <= most <= 256. OverflowError: items of more than 4 GiB.
        UnicodeEncodeError: a lone surrogate.
    """

    def __init__(self, items: list[str], most: int, least: int) -> None: ...
    def ngrams(self) -> int:
        """How many different ones there are."""

    def match(self, texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(spans [m, 3]: text, [begin, end) in characters, disjoint and in order; items [k, 2]: text, item)."""

def openwebtext_words(text: str) -> tuple[str, NDArray[np.int64]]:
    """(the matches of \\w+ in the lower case of a text, joined by newlines; where each begins in it, in characters)."""
