"""`mtrain finetune`: its data, tokenized into the run's folder by the model's tokenizer where it is jsonl.

Not a command itself. Labelled rows are in `finetune_task.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mdata
from mdata import BadInputError, UsageError
from mdata.errors import few, os_errors_named
from mdata.util import atomic_io

from .console import Console

if TYPE_CHECKING:
    from mdata.blend.blend import OpenBlend
    from mdata.chat.templates import RecordedTemplate
    from mdata.tokenizers.base.tokenizer import TokenizerConfig
    from trainer.convert.model_folder import ModelFolder

CHAT_KEYS = ("messages", "conversations")
# The fields by which records of other schemas are known.
CHAT_FIELDS = (
    ("pairs", "chosen", "rejected"),
    ("alpaca", "instruction", "output"),
    ("dolly", "instruction", "response"),
)
TEMPLATE_FILE, TOKENIZER_SETTINGS, TOKENIZER_FILE = "chat_template.jinja", "tokenizer_config.json", "tokenizer.json"
OWN = "tokenizer"  # see PreprocessOptions.chat_template


class Source(NamedTuple):
    """Data that a user names, and the folder into which it is tokenized if it is jsonl.

    `schema` and `key`: see `schema_and_key`.
    """

    folder: Path
    path: str
    schema: str
    key: str | None

    @property
    def prefix(self) -> str:
        """That of the tokenized files."""
        return str(self.folder / Path(self.path.rstrip("/")).name.split(".")[0])


def prepare_data(
    data: Source, model: ModelFolder, overwrite: bool, arguments: argparse.Namespace, console: Console
) -> str:
    """The manifest of the data, which is tokenized into its folder if it is jsonl; "" for no data."""
    from mdata.sources.record_batch import BadRowError
    from trainer.tasks.loaded_model import template_of_run

    folder, source, schema, key = data
    if key is None:
        return source
    check_pairs(schema == "pairs", source, arguments)
    if model.tokenizer is None:
        raise UsageError(
            f"{arguments.model} has no tokenizer for the texts in {source}",
            fix="--tokenizer FOLDER with the one that the model was trained with",
        )
    is_chat, template = schema != "text", arguments.chat_template
    if is_chat and template is None and isinstance(model.path, Path):
        template = _template_of_run(template_of_run(model.path), folder)
    own_template = _text_of_template(template, model.tokenizer) if is_chat else None
    files = _write_tokenizer(folder / "tokenizer", model, model.tokenizer, template=own_template)
    if own_template is not None:
        template = OWN
    if is_chat and template is None and _lacks_template(files, model.tokenizer):
        template = "plain"
        console.note("the tokenizer has no chat template: plain is used (User: ..., Assistant: ...)")
    kind = "texts" if not is_chat else "pairs of conversations" if schema == "pairs" else "conversations"
    kind += f" of {schema}" if schema in ("alpaca", "dolly") else f" under {key!r}"
    of_chat = {
        "chat_schema": schema,
        "chat_template": template,
        "chat_date": arguments.chat_date,
        "chat_train_on": arguments.chat_train_on,
    }
    console.note(f"{source}: {kind}, tokenized into {folder} by the model's tokenizer")
    options = mdata.PreprocessOptions(
        input=(source,),
        output_prefix=data.prefix,
        json_keys=(key,),
        append_eod=not is_chat,
        chat=is_chat,
        overwrite=overwrite,
        on_error=arguments.on_error or "stop",
        **(of_chat if is_chat else {}),
        **_tokenizer_options(folder / "tokenizer", files, model.tokenizer),
    )
    try:
        with console.progress() as progress:
            result = mdata.preprocess(options, progress)
    except BadRowError as error:  # this command has no option for another key or for longer records
        fix = "correct or remove this record, or skip such records (--on-error skip)"
        raise BadInputError(error.problem, found=error.found, fix=fix) from error
    (manifest,), (path,) = result.manifests.values(), result.paths.values()
    skipped = manifest.provenance.skipped if manifest.provenance else {}
    if counts := ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()) if count):
        console.note(f"{source}: left out: {counts}")
    return str(path)


def schema_and_key(source: str) -> tuple[str, str | None]:
    """What the records of jsonl are, and the key whose values are tokenized; None: the source is not jsonl, or "".

    Raises:
        UsageError: nothing there, an empty file, or records without such a key.
    """
    from mdata.sources.chunk import chunks, read_chunk
    from mdata.sources.input_files import find_inputs
    from mdata.sources.record_batch import ReadSpec

    if not source or (not Path(source).exists() and Path(f"{source}.idx").exists()):
        return "", None
    if not Path(source).exists():
        raise UsageError(f"there is no data {source}", fix="give the manifest of a corpus or blend, or jsonl")
    if Path(source).is_file() and not Path(source).stat().st_size:
        raise UsageError(f"{source} is empty", expected='records such as {"messages": [...]}, one a line')
    if source.endswith((".toml", ".csv")):
        return "", None
    spec = ReadSpec()
    files = find_inputs([source]).files[:1]
    if not files or files[0].format != "jsonl":
        raise UsageError(
            f"{source} is not jsonl", fix="tokenize it with mdata preprocess, and give the manifest in its place"
        )
    chunk = next(chunks(files, 1, spec=spec), None)
    line = b"" if chunk is None else read_chunk(chunk, spec).split(b"\n", 1)[0]
    beginning = f"{line[:60].decode(errors='replace')!r}"
    try:
        record = json.loads(line)
    except ValueError as error:
        if "jsonl" in Path(source).name.split("."):
            raise BadInputError(
                f"the first line of {source} is not JSON",
                found=beginning,
                expected='a record, such as {"messages": [...]}',
            ) from error
        return "", None  # the first line of a manifest
    keys = list(record) if isinstance(record, dict) else []
    for schema, field, other in CHAT_FIELDS:
        if field in keys and other in keys:
            return schema, field
    key = next((key for key in (*CHAT_KEYS, "text") if key in keys), None)
    if key is None and not {"format", "shards", "components"} & set(keys):
        raise UsageError(
            f"the first record of {source} has nothing to train on",
            found=f"keys {', '.join(map(repr, keys[:8]))}" if keys else beginning,
            expected="messages or conversations, text, chosen and rejected, or the fields of alpaca or dolly",
            fix="mdata preprocess --json-keys reads other names; give its manifest in place of the file",
        )
    return "text" if key == "text" else "messages", key


def check_pairs(is_pairs: bool, source: str, arguments: argparse.Namespace) -> None:
    """See that --dpo and pairs come together."""
    if is_pairs and not arguments.dpo:
        raise UsageError(f"{source} holds pairs of conversations", fix="--dpo trains on them")
    if arguments.dpo and not is_pairs:
        expected = "records with chosen and rejected, or a corpus of mdata preprocess --chat --chat-schema pairs"
        raise UsageError(f"--dpo: {source} holds no pairs of conversations", expected=expected)


def check_data(opened: OpenBlend, model: ModelFolder, arguments: argparse.Namespace) -> None:
    """See that there are tokens, and that they belong to the model."""
    from mdata.tokenizers.base.tokenizer import TokenizerConfig
    from mdata.tokenizers.registry import WITHOUT_FILES
    from trainer.convert.first_state import check_tokenizer, refuse_more_ids

    if not sum(corpus.num_tokens for corpus in opened.corpora):
        raise UsageError(f"{arguments.data} has nothing to train on", found="0 tokens", fix="give data with records")
    for corpus in opened.corpora:
        facts, where = corpus.tokenizer, str(arguments.model)
        if facts is not None:
            refuse_more_ids(facts.vocab_size, model, where=where)
        if (
            facts is not None
            and model.tokenizer is not None
            and ((files := corpus.tokenizer_files()) or facts.type in WITHOUT_FILES)
        ):
            made = TokenizerConfig(facts.type, files, facts.options, "tokenizers")
            check_tokenizer(made, model.tokenizer, where=where)


def with_new_tokens(model: ModelFolder, tokens: list[str]) -> tuple[ModelFolder, dict[str, Any]]:
    """The model with a tokenizer and weights for new tokens, and keys of [checkpoint] that say so."""
    from mdata.tokenizers.base.tokenizer import token_id
    from mdata.tokenizers.base.tokenizer_json import with_special_tokens
    from mdata.tokenizers.registry import build_tokenizer
    from trainer.convert.model_folder import with_new_rows

    made = model.tokenizer
    if made is None or "tokenizer.json" not in made.files:
        raise UsageError(
            f"--add-tokens: {model.path} has no tokenizer.json",
            found=made.name if made else "no tokenizer",
            fix="--tokenizer FOLDER with a tokenizer of Hugging Face",
        )
    before = build_tokenizer(made.name, made.files, options=made.options)
    definition = json.loads(made.files["tokenizer.json"])
    if present := [token for token in tokens if token_id(before, token) is not None]:
        raise UsageError(f"--add-tokens: the tokenizer has {few(present, 4)} already", fix="leave them out")
    definition = with_special_tokens(definition, tokens)
    files = {**made.files, "tokenizer.json": json.dumps(definition, ensure_ascii=False).encode()}
    tokenizer = made._replace(files=files)
    after = build_tokenizer(tokenizer.name, files, options=tokenizer.options)
    first = min(token_id(after, token) or 0 for token in tokens)
    rows = max(model.vocab_size, after.vocab_size)
    model = dataclasses.replace(model, tokenizer=tokenizer)
    return with_new_rows(model, first, rows, where=str(model.path)), {"new_rows_from": first}


def _template_of_run(recorded: RecordedTemplate | None, folder: Path) -> str | None:
    """The --chat-template that means a run's; one that is a text becomes a file of the folder."""
    if recorded is None or recorded.source is None:
        return None if recorded is None else recorded.name
    path = folder / TEMPLATE_FILE
    with os_errors_named("writing the chat template"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_io.atomic_write(path, recorded.source.encode())
    return str(path)


def _text_of_template(choice: str | None, tokenizer: TokenizerConfig) -> str | None:
    """The text of a template that is a file and can be kept with the tokenizer; None: it is another, or it cannot."""
    from mdata.chat.templates import CHATML, PLAIN, choose_template
    from mdata.tokenizers.registry import build_tokenizer

    if choice in (None, OWN, CHATML, PLAIN) or TOKENIZER_FILE not in tokenizer.files:
        return None
    choose_template(choice, build_tokenizer(tokenizer.name, tokenizer.files, options=tokenizer.options))  # is it one?
    with os_errors_named("reading the chat template"):
        return Path(choice).read_text(encoding="utf-8")


def _write_tokenizer(
    folder: Path, model: ModelFolder, tokenizer: TokenizerConfig, *, template: str | None
) -> dict[str, bytes]:
    """The tokenizer's files, written to the folder; a chat template becomes part of its settings.

    So it stays with the tokenizer in corpora, runs and exports, whose folders have no further file.

    Args:
        template: None: the one beside the tokenizer, if there is one.
    """
    from mdata.tokenizers.base.tokenizer_folder import write_folder

    files = dict(tokenizer.files)
    path = model.adapter.base.path if model.adapter is not None and model.format == "peft" else model.path
    with os_errors_named("writing the tokenizer"):
        beside = path / TEMPLATE_FILE if isinstance(path, Path) else None
        if template is None and beside is not None and beside.is_file():
            template = beside.read_text(encoding="utf-8")
        if template is not None and TOKENIZER_FILE in files:
            settings = json.loads(files.get(TOKENIZER_SETTINGS, b"{}"))
            settings["chat_template"] = template
            files[TOKENIZER_SETTINGS] = json.dumps(settings, indent=1, ensure_ascii=False).encode()
        if files:
            write_folder(folder, files)
    return files


def _tokenizer_options(folder: Path, files: Mapping[str, bytes], tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The options of preprocess for a tokenizer whose files lie in the folder."""
    from mdata.tokenizers.registry import FILES_OF

    options: dict[str, Any] = {
        "tokenizer_type": tokenizer.name,
        "tokenizer_options": tuple(sorted(tokenizer.options.items())),
    }
    for field in FILES_OF[tokenizer.name]:
        if tokenizer.name == "HuggingFaceTokenizer":
            options[field] = str(folder)
        else:
            start = {"vocab_file": "vocab", "merge_file": "merges"}.get(field, "")
            options[field] = str(next(folder / name for name in sorted(files) if name.startswith(start)))
    return options


def _lacks_template(files: Mapping[str, bytes], tokenizer: TokenizerConfig) -> bool:
    """Whether the tokenizer has neither a template nor the tokens of ChatML."""
    from mdata.chat.templates import END, START
    from mdata.tokenizers.base.tokenizer import token_id
    from mdata.tokenizers.registry import build_tokenizer

    built = build_tokenizer(tokenizer.name, files, options=tokenizer.options)
    own = "chat_template" in json.loads(files.get(TOKENIZER_SETTINGS, b"{}"))
    return not own and None in (token_id(built, START), token_id(built, END))
