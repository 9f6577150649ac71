"""Hugging Face folders: config.json, safetensors in one file or sharded by an index, generation config, tokenizer.

Opening reads only the headers of the files and checks them against config.json; a tensor's rows are read on demand.
Only safetensors are read: pytorch_model.bin is a pickle. Matrices in MXFP4, as gpt-oss is published, are read as the
bf16 numbers that they stand for. Writing streams tensors in our order, in shards of a given size, with the index beside
them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdata import DamageError, MdataError, UsageError
from mdata.chat.templates import TEMPLATE_FILE
from mdata.errors import counted, few, os_errors_named, wanted_by
from mdata.tokenizers.base.special_names import decoder_ends
from mdata.tokenizers.base.tokenizer import TokenizerConfig, TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, config_of, load_tokenizer
from mdata.util import atomic_io
from trainer.checkpoint.tiling import Rectangle
from trainer.config.parse import problems_error
from trainer.config.sections import RunConfig
from trainer.convert.hf_config import MXFP4, from_hf, hugging_face, to_hf
from trainer.convert.links import Link, Linked, Source, TensorInfo, link
from trainer.convert.masked_tokenizer import (
    SETTINGS,
    check_padding,
    with_added_tokens,
    with_ends_and_masks,
    without_ends,
)
from trainer.convert.model_folder import (
    BUFFER,
    ModelFolder,
    Report,
    check_layers,
    check_tensors,
    check_used,
    equal_tensors,
    no_run,
    num_bytes,
    read_json,
    read_pieces,
)
from trainer.convert.safetensors_stream import TYPES, split_by_size, write_safetensors
from trainer.models.family import Family, ModelShape, family_of

CONFIG, SINGLE, SHARDED = "config.json", "model.safetensors", "model.safetensors.index.json"
_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of a matrix in MXFP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"[^/\\\x00]+\.safetensors")


class SafetensorsSource:
    """The tensors of several safetensors files; rows are read on demand.

    Args:
        files: tensor -> its file; None: those of one file. folder: of the files.
        older_names: patterns of names -> their names here, unless another tensor has that name.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, str] | None, *, older_names: Mapping[str, str] | None = None
    ) -> None:
        self._open: dict[str, Any] = {}
        self._folder = folder
        listed = files or {}
        stored = {file: set(self._file(file).keys()) for file in dict.fromkeys(listed.values() or [SINGLE])}
        if missing := [(name, file) for name, file in listed.items() if name not in stored[file]]:
            self._refuse(missing[0][1], f"lacks a tensor that {SHARDED} lists", found=f"no {missing[0][0]}")
        # Tensors that the index does not list are read too.
        self._files: dict[str, str] = dict(listed)
        for file, names in stored.items():
            for name in sorted(names):
                if self._files.setdefault(name, file) != file:
                    other = self._files[name]
                    self._refuse(file, "has a tensor that another file also has", found=f"{name}, in {other}")
        self.tensors: dict[str, TensorInfo] = {}
        for name, file in self._files.items():
            part = self._file(file).get_slice(name)
            self.tensors[name] = TensorInfo(tuple(part.get_shape()), TYPES.get(part.get_dtype(), torch.int8))
        self._stored: dict[str, str] = {}  # called here -> its name in the file
        for pattern, new in (older_names or {}).items():
            for name in [name for name in self.tensors if re.search(pattern, name)]:
                if (called := re.sub(pattern, new, name)) not in self.tensors:
                    self.tensors[called] = self.tensors.pop(name)
                    self._stored[called] = name
        self._quantized = {name.removesuffix(BLOCKS) for name in self.tensors if name.endswith(BLOCKS)}
        for name in self._quantized:
            self.tensors[name] = self._mxfp4_info(name)

    @property
    def files(self) -> frozenset[str]:
        """The names of the files with the tensors."""
        return frozenset(self._open)

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        if name in self._quantized:
            return self._mxfp4(name, box)
        name = self._stored.get(name, name)
        file = self._file(self._files[name])
        if not box[0]:
            return cast(Tensor, file.get_tensor(name))
        rows: Tensor = file.get_slice(name)[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
        return rows

    def _mxfp4_info(self, name: str) -> TensorInfo:
        """Of a matrix [.., column, row] with blocks [.., row, column / 32, 16] and scales [.., row, column / 32]."""
        blocks, scales = self.tensors.pop(f"{name}{BLOCKS}").shape, self.tensors.pop(f"{name}{SCALES}", None)
        if scales is None or scales.shape != blocks[:-1] or blocks[-1:] != (16,) or len(blocks) < 3:
            self._refuse(
                self._files[f"{name}{BLOCKS}"],
                f"has blocks of {MXFP4} without scales that fit",
                found=f"{name}{BLOCKS} of {blocks}, {SCALES} of {None if scales is None else scales.shape}",
            )
        *outer, rows, groups, _ = blocks
        return TensorInfo((*outer, 32 * groups, rows), torch.bfloat16)

    def _mxfp4(self, name: str, box: Rectangle) -> Tensor:
        """A rectangle of such a matrix: numbers of four bits, of which 32 neighbours share a power of two."""
        (*first, column, row), (*size, columns, rows) = box
        groups = range(column // 32, -(-(column + columns) // 32))
        where, count = (*first, row, groups.start), (*size, rows, len(groups))
        bytes_ = self.read(f"{name}{BLOCKS}", ((*where, 0), (*count, 16))).long()
        exponents = self.read(f"{name}{SCALES}", (where, count)).to(torch.int32) - 127
        pairs = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)
        values = torch.ldexp(torch.tensor(E2M1)[pairs], exponents.unsqueeze(-1)).flatten(-2)
        return values[..., column - 32 * groups.start :][..., :columns].transpose(-1, -2).to(torch.bfloat16)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            if not path.is_file():
                raise DamageError(f"{path} is missing", found="no such file", fix="download the folder again")
            with os_errors_named("reading the weights"), path.open("rb"):
                pass  # the library calls a file damaged that may not be read
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DamageError(f"{path} is damaged", found=str(error), fix="download the file again") from error
        return self._open[name]

    def _refuse(self, file: str, problem: str, *, found: str) -> NoReturn:
        raise DamageError(f"{self._folder / file} {problem}", found=found, fix="download the folder again")


def hf_links(family: Family, shape: ModelShape, *, model_type: str, bare: bool = False) -> Iterator[Link]:
    """Links between our tensors and those of a Hugging Face folder, whose names are the family's.

    Args:
        bare: without the prefix of their names, as GPT-2 was published.
    """
    assert family.hugging_face is not None, "from_hf and to_hf refuse other families"
    buffers = {f"{BUFFER}/{name}": size for name, size in family.logical_buffers(shape).items()}
    weights = {f"weight/{name}": size for name, size in family.logical_shapes(shape).items()}
    for ours, size in (weights | buffers).items():
        name = ours.removeprefix(f"{BUFFER}/" if ours in buffers else "weight/")
        for form in family.hugging_face.forms(name, size, shape, model_type):
            theirs = form.tensor.removeprefix(family.hugging_face.prefixes.get(model_type, "")) if bare else form.tensor
            inside = {"ours_in": form.ours_in, "theirs_in": form.theirs_in}
            yield link((ours, form.ours), (theirs, form.theirs), lengths=form.lengths, **inside)


def is_hf(path: Path) -> bool:
    """Whether this is a folder of a Hugging Face model."""
    return (path / CONFIG).is_file()


def open_hf(path: Path) -> ModelFolder:
    """A folder with config.json and safetensors.

    Raises:
        UsageError: an unsupported model or setting. DamageError: files or tensors that are missing or do not fit.
    """
    config_json = read_json(path / CONFIG, subject="the model's configuration")
    config = from_hf(config_json, where=str(path / CONFIG))
    source = SafetensorsSource(path, _shards(path), older_names=hugging_face(config).older_names)
    model = with_names_of_hf(path, config_json, config, source)
    if unread := sorted({file.name for file in path.glob("*.safetensors")} - source.files):
        note = f"not read, because they do not belong to this model: {few(unread, 4)}"
        model = dataclasses.replace(model, notes=(*model.notes, note))
    return model


def with_names_of_hf(path: Path, config_json: dict[str, Any], config: RunConfig, source: Source) -> ModelFolder:
    """A model whose tensors have the names and shapes of transformers.

    Raises:
        UsageError: a part that we lack. DamageError: tensors that are missing or do not fit.
    """
    family, face = family_of(config), hugging_face(config)
    notes, model_type = [*face.notes(config_json)], config_json["model_type"]
    check_layers(config.model.num_layers, len(source.tensors), where=path)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    if lacking := [*face.lacking(shapes)]:
        raise UsageError(f"{path} is not a whole model", found=few(lacking), fix="convert a folder that has it")
    config, seen = face.seen(config, shapes)
    notes += seen
    rows = config.model.vocab_size or 0
    size = rows, config.model.hidden_size
    shape = family.shape(config, rows)
    prefix, tied = face.prefixes.get(model_type, ""), face.forms("embedding.weight", size, shape, model_type)[0].tensor
    head = face.forms("head.weight", size, shape, model_type)[0].tensor
    bare = tied.removeprefix(prefix) in source.tensors
    tied = tied.removeprefix(prefix) if bare else tied
    if face.ties_by_presence and head not in source.tensors:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_embeddings=True))
    both = config.model.tie_embeddings and {head, tied} <= source.tensors.keys()
    if both and not equal_tensors(source, (head, tied), size=size):
        # As transformers 5 does.
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_embeddings=False))
        contradiction = f"config.json says tie_word_embeddings, but {head} and {tied} differ"
        notes.append(f"{contradiction}: both are used, and model.tie_embeddings is false")
        if problems := [*family.problems(config)]:
            raise problems_error(str(path), [f"{contradiction}: {problem}" for problem in problems])
    shape = family.shape(config, rows)
    links = list(hf_links(family, shape, model_type=model_type, bare=bare))
    check_tensors(source.tensors, {link.theirs.tensor: link.theirs.shape for link in links}, where=path)
    pattern = face.buffers.get(model_type)
    buffers = {name for name in source.tensors if pattern and re.fullmatch(pattern, name)}
    used = {link.theirs.tensor for link in links} | ({head} if config.model.tie_embeddings else set()) | buffers
    fix = f"only what {face.auto_class(config)} computes is read; merge adapters first"
    check_used(source.tensors, used, where=path, fix=fix)
    if other := [name for name in buffers if not face.is_derived(name, _whole(source, name), shape)]:
        notes.append(f"not used, although they differ from what config.json gives: {few(sorted(other), 4)}")
    return ModelFolder(
        path=path,
        format="hf",
        config=config,
        source=Linked(source, links),
        run=no_run(config),
        tokenizer=find_tokenizer(path),
        notes=tuple(notes),
    )


def _whole(source: Source, name: str) -> Tensor:
    size = source.tensors[name].shape
    return source.read(name, (tuple(0 for _ in size), size))


def find_tokenizer(path: Path) -> TokenizerConfig | None:
    """The tokenizer in a folder."""
    if (spec := _tokenizer_spec(path)) is None:
        return None
    try:
        return config_of(load_tokenizer(spec))
    except MdataError as error:
        raise wanted_by(f"the tokenizer in {path}", error) from error


def _tokenizer_spec(path: Path) -> TokenizerSpec | None:
    definition, vocab, merges, words, model = (
        path / name for name in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")
    )
    stored = path / SETTINGS
    settings = read_json(stored, subject="the tokenizer's settings") if stored.is_file() else {}
    if definition.is_file():
        return TokenizerSpec(type="HuggingFaceTokenizer", model=str(path))
    if vocab.is_file() and merges.is_file():
        return TokenizerSpec(type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    if words.is_file() and settings.get("do_lower_case", True):  # Megatron's type for capitals has further ids
        options = _special_tokens(settings)
        return TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=str(words), options=options)
    return TokenizerSpec(type="Llama2Tokenizer", model=str(model)) if model.is_file() else None


def _special_tokens(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The option for special tokens beyond vocab.txt, such as the sentinels of T5, in the order of their ids."""
    tokens = [token for token in settings.get("additional_special_tokens") or () if isinstance(token, str)]
    return (("special_tokens", tokens),) if tokens else ()


def write_hf(
    target: Path,
    model: ModelFolder,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    model_type: str,
    report: Report,
) -> None:
    """Write a folder that transformers opens; the folder is new or empty.

    Args:
        dtype: of the stored weights. model_type: of config.json; "": the one that fits the model.

    Raises:
        UsageError: no such config.json expresses the model.
    """
    config = to_hf(model.config, model.vocab_size, model_type=model_type)
    if config["model_type"] == "roberta" and model.tokenizer is not None:
        check_padding(model.tokenizer, config["pad_token_id"], config["model_type"])
    links = [link.flipped() for link in hf_links(model.family, model.shape, model_type=config["model_type"])]
    theirs = Linked(model.source, links)
    buffers = {link.ours.tensor for link in links if link.theirs.tensor.startswith(f"{BUFFER}/")}
    entries = {
        name: TensorInfo(info.shape, torch.float32 if name in buffers else dtype)
        for name, info in theirs.tensors.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    parts = split_by_size(entries, max_shard_bytes)
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(target / file, part, pieces=read_pieces(theirs, part, report=report))
        where |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = {"total_size": num_bytes(entries)}
        _write_json(target / SHARDED, {"metadata": total, "weight_map": where})
    ends = _special_ids(model)
    _write_json(target / "generation_config.json", {**ends, "do_sample": False})
    if model.tokenizer is not None:
        tokenizer = with_added_tokens(model.tokenizer)
        fills_masks, has_encoder = model.family.predicts == "masked", "decoder_start_token_id" in ends
        bare = without_ends(tokenizer) if has_encoder else None
        files = bare or (with_ends_and_masks(tokenizer) if fills_masks else tokenizer.files)
        for name, content in files.items():
            atomic_io.atomic_write(target / name, content)
        if model.tokenizer.name.startswith("BertWordPiece") and not bare:  # else transformers takes its model type's
            settings = _wordpiece_settings(model.tokenizer)
            if has_encoder:  # T5 refuses the token types that BertTokenizer makes
                settings["model_input_names"] = ["input_ids", "attention_mask"]
            _write_json(target / SETTINGS, settings)
        if model.template is not None and model.template.source is not None and TEMPLATE_FILE not in files:
            atomic_io.atomic_write(target / TEMPLATE_FILE, model.template.source.encode())
    # Last: a folder without it is not a model.
    _write_json(target / CONFIG, {**ends, **config, "dtype": _NAMES[dtype], "torch_dtype": _NAMES[dtype]})


def _wordpiece_settings(tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The settings with which transformers makes our ids of a vocab.txt."""
    ids = build_tokenizer(*tokenizer[:2], options=tokenizer.options).special_ids
    named = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.name == "BertWordPieceLowerCase",
        "additional_special_tokens": [token for token in sorted(ids, key=ids.__getitem__) if token not in named],
    }


def _special_ids(model: ModelFolder) -> dict[str, int | None]:
    """The entries of config.json for the end of a document; without them transformers uses the family's own ids.

    A decoder of transformers begins with what pads its rows.
    """
    tokenizer, config = model.tokenizer, model.config
    built = None if tokenizer is None else build_tokenizer(*tokenizer[:2], options=tokenizer.options)
    ids = {"bos_token_id": None, "eos_token_id": None if built is None else built.eod, "pad_token_id": None}
    start = model.family.decoder_start(config, built)
    if start is None:
        return ids
    end = None if built is None else decoder_ends(built)[1]
    return ids | {"eos_token_id": end, "decoder_start_token_id": start, "pad_token_id": start}


def _shards(path: Path) -> dict[str, str] | None:
    """Tensor -> file of a sharded model; None: there is one file."""
    if (path / ADAPTER).is_file():
        raise UsageError(f"{path} holds an adapter ({ADAPTER})", fix="merge it into the model's weights first")
    if (path / SHARDED).is_file():
        table = read_json(path / SHARDED, subject="the index of the shards").get("weight_map")
        if not isinstance(table, dict) or not table:
            raise DamageError(f"{path / SHARDED} has no weight_map", found=repr(table)[:80], fix="fetch it anew")
        for file in table.values():
            if not isinstance(file, str) or not _SHARD.fullmatch(file):
                raise DamageError(f"{path / SHARDED} names a file outside", found=repr(file)[:120], fix="fetch it anew")
        missing = sorted({file for file in table.values() if not (path / file).is_file()})
        if missing:
            raise DamageError(f"shards of {path} are missing", found=few(missing, 4), fix="fetch them")
        if (path / SINGLE).is_file() and SINGLE not in table.values():
            raise UsageError(
                f"{path} holds two models",
                found=f"{SINGLE}, and {SHARDED} with {counted(len(set(table.values())), 'other file')}",
                fix="move away the files of the one that you do not want",
            )
        return table
    if not (path / SINGLE).is_file():
        others = sorted(file.name for file in path.glob("*.bin"))
        raise UsageError(
            f"{path} has no weights that can be read",
            found=few(others, 4) or "neither of the files below",
            expected=f"{SINGLE}, or {SHARDED} with its shards",
            fix="save the model as safetensors (transformers: save_pretrained)" if others else None,
        )
    return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    atomic_io.atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())
