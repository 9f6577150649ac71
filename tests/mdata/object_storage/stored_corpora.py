"""A corpus of seven blocks in two shards, on a disk and in a bucket, and the ways in which samples of it are read."""

from __future__ import annotations

import msgspec
import numpy as np

import mdata
from mdata.manifest.io import load_manifest, save_manifest
from mdata.samples.special_tokens import MaskedVocabulary
from tests.helpers.corpora import write_pair

VOCABULARY = MaskedVocabulary(
    ids=tuple(range(1000)),
    continuations=tuple(range(500, 600)),
    cls=1,
    sep=2,
    mask=3,
    bos=4,
    eos=5,
    sentinels=tuple(range(6, 26)),
    pad=0,
)
S = 512
FIM = mdata.Fim(rate=0.5, tokens=(30, 31, 32, 33), level="token")
KINDS = {
    "gpt": {},
    "masks": {"kind": mdata.Gpt(document_masks=True, eod=7)},
    "blocks": {"order": mdata.NativeOrder(shuffle_block=64)},
    "fim": {"kind": mdata.Gpt(fim=FIM, eod=7)},
    "document": {"kind": mdata.Document(eod=7)},
    "packed": {"kind": mdata.Packed(eod=7)},
    "bert": {"kind": mdata.Bert(vocabulary=VOCABULARY)},
    "full rows": {"kind": mdata.Bert(vocabulary=VOCABULARY, head=False, full_rows=True)},
    "t5": {"kind": mdata.T5(vocabulary=VOCABULARY, decoder_length=128)},
    "megatron": {"order": mdata.MegatronOrder()},
    "valid": {"split": "valid", "split_shares": "90,10,0"},
    "pread": {"mode": "pread"},
}


def make_corpus(folder):
    """Sentences of 300 to 3,000 tokens, one to four in a document; two pairs and one manifest, which is returned."""
    random = np.random.default_rng(5)
    shards = []
    for name, blocks in (("a", 3.3), ("b", 2.2)):
        left, documents = int(blocks * (2 << 20)), []
        while left:
            sentences = []
            for length in random.integers(300, 3000, random.integers(1, 5)).tolist():
                sentences.append(min(length, left))
                left -= sentences[-1]
                if not left:
                    break
            documents.append(sentences)
        tokens = random.integers(40, 1000, sum(map(sum, documents)))
        write_pair(folder / name, documents, tokens=tokens, code=8)
        mdata.adopt(folder / name, None, full=True, level="sentence")
        shards.append(load_manifest(folder / f"{name}.json"))
    whole = msgspec.structs.replace(shards[0], shards=[one.shards[0] for one in shards], statistics=None)
    save_manifest(whole, folder / "whole.json")
    return folder / "whole.json"


def fields_of(rows):
    """What a read gives, as a dict of arrays."""
    if isinstance(rows, dict):
        return rows
    found = {"text": rows.text, "loss_mask": rows.loss_mask}
    return found | ({} if rows.position_ids is None else {"position_ids": rows.position_ids})


def check_same(far, near, numbers):
    """Both datasets give the same fields for these samples."""
    found, expected = (fields_of(dataset.read(numbers)) for dataset in (far, near))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
