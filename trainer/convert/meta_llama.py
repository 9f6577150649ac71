"""Llama 2 as Meta distributes it: params.json, and consolidated.00.pth to consolidated.07.pth for eight GPUs.

Each file has a rank's share of every matrix. They are shown joined, with the names and the order of transformers, which
rotates the halves of a head where Meta's code rotates neighbours; the rest is as for a Hugging Face folder.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdata import DamageError, UsageError
from mdata.errors import few
from mdata.tokenizers.base.tokenizer import TokenizerConfig, TokenizerSpec
from mdata.tokenizers.registry import config_of, load_tokenizer
from trainer.convert.hf_config import from_hf
from trainer.convert.hf_folder import find_tokenizer, with_names_of_hf
from trainer.convert.links import Link, Linked, link
from trainer.convert.model_folder import ModelFolder, check_layers, check_tensors, check_used, equal_tensors, read_json
from trainer.convert.torch_file import StoredSource, StoredTensor, load_torch, unread

PARAMS, FILES, TOKENIZER = "params.json", "consolidated.*.pth", "tokenizer.model"
_FILE = re.compile(r"consolidated\.(\d\d)\.pth")
# Of the first release; later ones have settings that change the function.
_SIZES, _OTHERS = (
    ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size"),
    ("norm_eps", "multiple_of", "ffn_dim_multiplier"),
)
_DERIVED = "rope.freqs"
_CONTEXT = 4096


def is_meta(path: Path) -> bool:
    """Whether this is such a folder."""
    return (path / PARAMS).is_file() and any(path.glob(FILES))


def open_meta(path: Path) -> ModelFolder:
    """A folder of Llama 2 as Meta distributes it.

    Raises:
        UsageError: another model. DamageError: files or tensors that are missing or do not fit.
    """
    params = read_json(path / PARAMS, subject="the model's parameters")
    files = [_tensors(file) for file in _files(path)]
    held = {f"{number}/{name}": tensor for number, tensors in enumerate(files) for name, tensor in tensors.items()}
    sizes = _sizes(params, files, where=path / PARAMS)
    check_layers(sizes["n_layers"], len(held), where=path)
    links = list(_links(sizes, len(files)))
    stored = StoredSource(held)
    check_tensors(stored.tensors, {link.theirs.tensor: link.theirs.shape for link in links}, where=path)
    used = {link.theirs.tensor for link in links}
    copies = [name for name in held if name.endswith("norm.weight") and name not in used]
    derived = {name for name in held if name.endswith(f"/{_DERIVED}")}
    check_used(held, used | {*copies} | derived, where=path, fix="only Llama 2 is read from Meta's files")
    notes = [f"{PARAMS} has no context length: that of Llama 2, {_CONTEXT}, is taken"]
    pairs = [(name, f"0/{name.partition('/')[2]}") for name in copies]
    if differing := [a for a, b in pairs if not equal_tensors(stored, (a, b), size=stored.tensors[b].shape)]:
        notes.append(f"files differ in what they all hold; the first one's is used: {few(differing, 4)}")
    config_json = {
        "model_type": "llama",
        "hidden_size": sizes["dim"],
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": sizes["n_kv_heads"],
        "intermediate_size": sizes["ffn"],
        "vocab_size": sizes["vocab_size"],
        "rms_norm_eps": params["norm_eps"],
        "max_position_embeddings": _CONTEXT,
        "tie_word_embeddings": False,
    }
    config = from_hf(config_json, where=str(path / PARAMS))
    model = with_names_of_hf(path, config_json, config, Linked(stored, links))
    return dataclasses.replace(model, format="meta", tokenizer=_tokenizer(path), notes=(*model.notes, *notes))


def _files(path: Path) -> list[Path]:
    """In the order of their numbers, of which none is missing."""
    files = sorted(file for file in path.glob(FILES) if _FILE.fullmatch(file.name))
    expected = [f"consolidated.{number:02}.pth" for number in range(len(files))]
    if [file.name for file in files] != expected or not files:
        found = few([file.name for file in path.glob(FILES)], 8)
        raise DamageError(f"{path} lacks files of weights", found=found, expected=few(expected, 8), fix="download them")
    return files


def _tensors(file: Path) -> Mapping[str, StoredTensor]:
    value = load_torch(file)
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in value.items()
    ):
        found = unread(value) if not isinstance(value, Mapping) else "values that are not tensors"
        raise UsageError(f"{file} does not hold tensors by name", found=found, fix="download it again")
    return value


def _sizes(params: Mapping[str, Any], files: Sequence[Mapping[str, StoredTensor]], *, where: Path) -> dict[str, int]:
    """All sizes of the model; those of the vocabulary and of the MLP follow from tensors.

    Raises:
        UsageError: settings that Llama 2 does not have. DamageError: sizes that do not fit the files.
    """
    if others := [name for name in params if name not in (*_SIZES, *_OTHERS)]:
        raise UsageError(
            f"{where} is not that of Llama 2",
            found=few(others, 4),
            expected=f"only {', '.join((*_SIZES, *_OTHERS))}",
            fix="convert the Hugging Face folder of this model",
        )
    given = {"n_kv_heads": params.get("n_heads"), "vocab_size": -1, **params}
    sizes: dict[str, Any] = {name: given.get(name) for name in _SIZES}
    sizes["ffn"] = _rows(files, "layers.0.feed_forward.w1.weight")
    if sizes["vocab_size"] == -1:
        sizes["vocab_size"] = _rows(files, "output.weight")
    wrong = [f"{name} {value!r}" for name, value in sizes.items() if type(value) is not int or value < 1]
    if not wrong:
        divided = [name for name in sizes if name != "n_layers"]
        wrong = [f"{name} {sizes[name]} for {len(files)} files" for name in divided if sizes[name] % len(files)]
        wrong += [f"dim {sizes['dim']} for n_heads {sizes['n_heads']}"] if sizes["dim"] % (2 * sizes["n_heads"]) else []
    if type(given.get("norm_eps")) is not float:
        wrong.append(f"norm_eps {given.get('norm_eps')!r}")
    if wrong:
        raise DamageError(f"{where} does not fit the files of weights", found=few(wrong, 4), fix="download them again")
    return sizes


def _rows(files: Sequence[Mapping[str, StoredTensor]], name: str) -> int:
    tensor = files[0].get(name)
    return tensor.shape[0] * len(files) if tensor is not None and len(tensor.shape) == 2 else 0


def _links(sizes: Mapping[str, int], files: int) -> Iterator[Link]:
    """Tensors of transformers as ours, those of Meta's files as theirs."""
    dim, heads, kv_heads, ffn = (sizes[name] for name in ("dim", "n_heads", "n_kv_heads", "ffn"))
    channels = dim // heads
    yield from _cut("model.embed_tokens", "tok_embeddings", (sizes["vocab_size"], dim), files, along="column")
    yield from _cut("lm_head", "output", (sizes["vocab_size"], dim), files, along="row")
    yield _norm("model.norm", "norm", dim)
    for layer in range(sizes["n_layers"]):
        ours, theirs = f"model.layers.{layer}", f"layers.{layer}"
        for part, count in (("q", heads), ("k", kv_heads)):
            yield from _rotated(
                f"{ours}.self_attn.{part}_proj", f"{theirs}.attention.w{part}", (count, channels, dim), files
            )
        yield from _cut(
            f"{ours}.self_attn.v_proj", f"{theirs}.attention.wv", (kv_heads * channels, dim), files, along="row"
        )
        yield from _cut(f"{ours}.self_attn.o_proj", f"{theirs}.attention.wo", (dim, dim), files, along="column")
        for name, part in (("gate", "w1"), ("up", "w3")):
            yield from _cut(f"{ours}.mlp.{name}_proj", f"{theirs}.feed_forward.{part}", (ffn, dim), files, along="row")
        yield from _cut(f"{ours}.mlp.down_proj", f"{theirs}.feed_forward.w2", (dim, ffn), files, along="column")
        yield _norm(f"{ours}.input_layernorm", f"{theirs}.attention_norm", dim)
        yield _norm(f"{ours}.post_attention_layernorm", f"{theirs}.ffn_norm", dim)


def _cut(ours: str, theirs: str, size: tuple[int, int], files: int, *, along: str) -> Iterator[Link]:
    """A matrix whose rows or columns are divided among the files."""
    lengths = dict(zip(("row", "column"), size, strict=True))
    each = lengths[along] // files
    for number in range(files):
        yield link(
            (f"{ours}.weight", "row column"),
            (f"{number}/{theirs}.weight", "row column"),
            lengths={**lengths, along: each},
            ours_in={along: (number * each, lengths[along])},
        )


def _rotated(ours: str, theirs: str, size: tuple[int, int, int], files: int) -> Iterator[Link]:
    """A matrix of queries or keys: heads are divided among the files, and rotated channels are ordered differently."""
    heads, channels, width = size
    each = heads // files
    for number in range(files):
        yield link(
            (f"{ours}.weight", "(head half pair) column"),
            (f"{number}/{theirs}.weight", "(head pair half) column"),
            lengths={"head": each, "half": 2, "pair": channels // 2, "column": width},
            ours_in={"head": (number * each, heads)},
        )


def _norm(ours: str, theirs: str, size: int) -> Link:
    return link((f"{ours}.weight", "row"), (f"0/{theirs}.weight", "row"), lengths={"row": size})


def _tokenizer(path: Path) -> TokenizerConfig | None:
    """That of the folder, or Meta's beside it: one file for all sizes."""
    beside = path.absolute().parent / TOKENIZER
    if (path / TOKENIZER).is_file() or not beside.is_file():
        return find_tokenizer(path)
    return config_of(load_tokenizer(TokenizerSpec(type="Llama2Tokenizer", model=str(beside))))
