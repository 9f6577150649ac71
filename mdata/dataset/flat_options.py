"""`DatasetOptions` from flat keys, as configurations and command lines give them.

`kind` and `order` are names here, and the options of a kind, of an order and of fill-in-the-middle (`fim_...`) are keys
at the same level. A key that does not apply to the chosen kind or order must be left out or have its default value.
`data_found` locates the paths of a run that was started in another folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

from mdata.blend.data_path import is_weight
from mdata.corpus.open_part import is_stored
from mdata.dataset.dataset_options import DatasetOptions, MegatronOrder, NativeOrder
from mdata.dataset.mock_data import MOCK
from mdata.errors import UsageError
from mdata.samples.sample_options import T5, Bert, Chat, Document, Fim, Gpt, Packed, check_one_of

KINDS = {kind.name: kind for kind in (Gpt, Document, Packed, Chat, Bert, T5)}
ORDERS = {order.name: order for order in (NativeOrder, MegatronOrder)}
_OWNERS = (DatasetOptions, *KINDS.values(), *ORDERS.values(), Fim)
_FIELDS = {
    one: {f"fim_{field.name}" if one is Fim else field.name: field for field in fields(one) if field.name != "fim"}
    for one in _OWNERS
}
KEYS = tuple(dict.fromkeys(key for one in _OWNERS for key in _FIELDS[one]))


def options_from_keys(*, kind: str = Gpt.name, order: str = NativeOrder.name, **keys: Any) -> DatasetOptions:
    """Build `DatasetOptions` from flat keys; a key that is None counts as not given.

    Args:
        kind: "gpt", "document", "packed", "chat", "bert" or "t5".
        order: "native" or "megatron".
        keys: fields of `DatasetOptions`, of the kind and of the order; those of `Fim` as fim_rate (0: none) and so on.

    Raises:
        UsageError: conflicting keys, or values out of range. TypeError: an unknown key.
    """
    check_one_of("kind of samples", kind, known=KINDS)
    check_one_of("order", order, known=ORDERS)
    made: dict[Any, dict[str, Any]] = {one: {} for one in (DatasetOptions, KINDS[kind], ORDERS[order])}
    made |= {Fim: {}} if kind == Gpt.name else {}
    for key, value in keys.items():
        if key not in KEYS:
            raise TypeError(f"no option {key!r} of a dataset")
        if value is None:
            continue
        owner = next((one for one in made if key in _FIELDS[one]), None)
        if owner is not None:
            made[owner][_FIELDS[owner][key].name] = value
        elif value != _usual(key):
            whose = f"the {order} order has" if _is_of_orders(key) else f"samples of kind {kind!r} have"
            raise UsageError(f"{whose} no {key}", found=f"{key}={value!r}")
    if kind == T5.name and "decoder_length" not in made[T5]:
        raise UsageError("samples of kind 't5' need the decoder's length", fix="decoder_length=128")
    if made.get(Fim, {}).get("rate"):
        made[Gpt]["fim"] = Fim(**made[Fim])
    of_kind, of_order = KINDS[kind](**made[KINDS[kind]]), ORDERS[order](**made[ORDERS[order]])
    return DatasetOptions(**made[DatasetOptions], kind=of_kind, order=of_order)


def document_mask_keys(*, order: str, wanted: bool) -> dict[str, bool]:
    """The keys that keep documents apart in a training run.

    These are the documents of the index, or in Megatron's order what its --reset-position-ids and
    --reset-attention-mask do, using the id that ends a document.
    """
    if order == MegatronOrder.name:
        return {"reset_position_ids": wanted, "reset_attention_mask": wanted}
    return {"document_masks": wanted}


def _is_of_orders(key: str) -> bool:
    return any(key in _FIELDS[one] for one in ORDERS.values())


def _usual(key: str) -> Any:
    default = next(_FIELDS[one][key].default for one in _OWNERS if key in _FIELDS[one])
    return None if default is MISSING else default


STARTED_IN = "started_in"
"""In plan.json: where the run was started, as a path relative to the run folder and as an absolute path."""


def data_found(data: Mapping[str, Any], folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The [data] of a run, with relative paths resolved to where the data is, if it is found.

    They are resolved from the folder where the run was started; the run folder may have been moved with the data, or
    alone. Otherwise, and for run folders that do not record it, they stay relative to the working folder.
    """
    started = plan.get(STARTED_IN)
    named = (started.get("from_here"), started.get("absolute")) if isinstance(started, dict) else ()
    begun = [folder / place for place in named if isinstance(place, str)]

    def found(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(found, value))
        if not isinstance(value, str) or is_stored(value) or value == MOCK:
            return value
        return next(filter(None, (_placed(value, place) for place in begun)), value)

    return {key: found(value) if key in ("blend", "valid", "test", "cache") else value for key, value in data.items()}


def _placed(text: str, place: Path) -> str | None:
    """A data path, or Megatron's "0.7 a 0.3 b", resolved in this folder; None: some of the paths do not exist."""
    joined = os.path.join(place, text)  # noqa: PTH118 - keeps blanks and patterns
    if _is_there(joined):
        return joined
    words = [
        word if is_weight(word) or is_stored(word) else os.path.join(place, word)  # noqa: PTH118
        for word in text.split()
    ]
    one_each = len(" ".join(words).split()) == len(words)  # no blanks in the folder's own name
    return " ".join(words) if one_each and all(is_weight(word) or _is_there(word) for word in words) else None


def _is_there(path: str) -> bool:
    there = any(os.path.exists(path + end) for end in ("", ".json", ".idx"))  # noqa: PTH110 - of any length
    return is_stored(path) or there or (has_magic(path) and any(iglob(path)))  # noqa: PTH207
