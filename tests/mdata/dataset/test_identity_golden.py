"""The identity of a dataset, byte for byte, for hundreds of combinations of options: it decides every data id.

tests/golden/identities.json holds a hash of each, or null if the options conflict. The hashes were made before kinds
and orders became separate types. Run this file as a script to regenerate it.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from blake3 import blake3

from mdata import DatasetOptions, UsageError
from mdata.samples.sample_options import MaskingOptions
from mdata.samples.special_tokens import MaskedVocabulary

GOLDEN = Path(__file__).parents[2] / "golden" / "identities.json"
BLEND = "ab" * 32
VOCABULARY = MaskedVocabulary(ids=(0, 1, 2, 3), cls=1, sep=2, mask=3, sentinels=(2, 3))

TOP = {
    "plain": {},
    "seeded": {"sequence_length": 48, "seed": 7},
    "train": {"split_shares": "98,1,1", "num_samples": 100, "threads": 2, "mode": "pread", "cache": "c"},
    "valid": {"split": "valid", "split_shares": "0.9,0.1", "num_samples": 10, "allow_outside": True},
    "test": {"split": "test", "split_shares": "1,1,1", "tokenizer_unknown": "ok"},
    "whole": {"split": "whole"},
}
ROWS = {
    "": {},
    "no-extra": {"extra_token": False},
    "masks": {"document_masks": True, "eod": 0},
    "resets": {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True, "eod": 5},
    "dense": {"create_attention_mask": True},
}
MASKED = {
    "": {},
    "short": {"short_probability": 0.25},
    "masking": {"masking": MaskingOptions(probability=0.2, max_ngram=4, longer_ngrams=True)},
    "vocabulary": {"vocabulary": VOCABULARY},
}
OF_KIND = {
    "gpt": {
        **ROWS,
        "blocks": {"shuffle_block": 8},
        "blocks-masks": {"shuffle_block": 8, "document_masks": True},
        "fim": {"fim_rate": 0.5},
        "fim-all": {
            "fim_rate": 1.0,
            "fim_spm_rate": 0.25,
            "fim_level": "token",
            "fim_tokens": (5, 6, "<s>", 0),
            "fim_split_sample": "<f>",
            "fim_fragment_rate": 0.75,
            "fim_no_prefix": "#!",
        },
        "fim-none": {"fim_rate": 0.0, "fim_spm_rate": 0.25},
    },
    "document": {**ROWS, "drop": {"longer": "drop"}},
    "packed": {**ROWS, "drop": {"longer": "drop"}},
    "chat": {**ROWS, "drop": {"longer": "drop"}},
    "bert": {
        **MASKED,
        "headless": {"head": False},
        "permutation": {"masking": MaskingOptions(permutation=True)},
    },
    "t5": {name: {"decoder_length": 16, **more} for name, more in MASKED.items()},
}
OF_ORDER = {
    "native": {"": {}},
    "megatron": {
        "": {},
        "pad": {"pad": 0},
        "ambiguous": {"pad": 0, "allow_ambiguous_pad": True},
        "partial": {"keep_partial": True},
        "surplus": {"blend_surplus": 0.1},
    },
}


def combinations() -> dict[str, dict[str, object]]:
    """Name -> flat options."""
    found: dict[str, dict[str, object]] = {}
    for top, kind, order in product(TOP, OF_KIND, OF_ORDER):
        for (one, of_kind), (two, of_order) in product(OF_KIND[kind].items(), OF_ORDER[order].items()):
            base = {"sequence_length": 32, **TOP[top]}
            found[f"{top} {kind}:{one} {order}:{two}"] = {**base, "kind": kind, "order": order, **of_kind, **of_order}
    return found


def hash_of(flat: dict[str, object]) -> str | None:
    """Of the identity's text, keys in their order; None where it is refused."""
    try:
        identity = DatasetOptions.from_keys(flat).identity(BLEND)
    except UsageError:
        return None
    return blake3(json.dumps(identity).encode()).hexdigest()[:16]


def test_identities_are_those_of_before():
    found = {name: hash_of(flat) for name, flat in combinations().items()}
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


if __name__ == "__main__":
    hashes = {name: hash_of(flat) for name, flat in combinations().items()}
    GOLDEN.write_text(json.dumps(hashes, indent=0) + "\n", encoding="utf-8")
