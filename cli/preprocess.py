r"""Turn text into Megatron-format token files, with the options of Megatron's preprocess_data.py.

For each key the results are PREFIX_KEY_document.bin, .idx and .json (the manifest); with --split-sentences
PREFIX_KEY_sentence.*, with --chat PREFIX_KEY_chat.*. They do not depend on --workers. After an interruption the same
command continues.

Examples:
  mdata preprocess --input web.jsonl --output-prefix web \
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok --append-eod
  mdata preprocess --input code.jsonl --output-prefix code \
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok --append-eod --on-error skip
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import mdata
from mdata.errors import counted

from .console import Console
from .preprocess_options import add_arguments, policy_of
from .text import table
from .tokenizer_options import tokenizer_options_of

if TYPE_CHECKING:
    from mdata.preprocessing.finished import PreprocessResult

_FILES_SHOWN = 100
_LEAVE_OUT = ("where", "skip_rows", "skip", "limit", "min_tokens", "max_tokens")  # options that filter rows

__all__ = ["add_arguments", "main", "options_of"]


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.preprocess`, or `estimate` with --dry-run, and print the result."""
    options, ignored = options_of(arguments)
    if ignored:
        hint = "; --dry-run suggests the best number of workers" if "--find-optimal-num-workers" in ignored else ""
        console.note(f"mdata: accepted but ignored: {', '.join(ignored)}{hint}")
    with console.progress(continues=not arguments.dry_run) as progress:
        if arguments.dry_run:
            from mdata.preprocessing.estimate import estimate

            facts = asdict(estimate(options, progress))
        else:
            result = mdata.preprocess(options, progress)
    if arguments.dry_run:
        console.result(_estimate_text(facts), facts)
        return
    for line in _remarks(result):
        console.note(f"mdata: {line}")
    rows = [_row(str(result.paths[name]), manifest) for name, manifest in result.manifests.items()]
    console.result(table(tuple(rows[0])[:-1], [tuple(row.values())[:-1] for row in rows]), {"corpora": rows})


def options_of(arguments: argparse.Namespace) -> tuple[mdata.PreprocessOptions, tuple[str, ...]]:
    """The options for the library, and the given options that have no effect, each once."""
    from mdata.sources.chat_schema import SCHEMA_KEYS

    tokenizer_options, unused = tokenizer_options_of(arguments)
    on_error = policy_of(arguments)
    optional = {"workers": arguments.workers, "max_record_bytes": arguments.max_record_bytes}
    if arguments.tokens_column and arguments.json_keys:
        raise mdata.UsageError("--tokens-column names the one key", fix="leave --json-keys out")
    default = arguments.tokens_column or (SCHEMA_KEYS[arguments.chat_schema] if arguments.chat else "text")
    options = mdata.PreprocessOptions(
        input=tuple(arguments.input),
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        output_prefix=arguments.output_prefix,
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        tokenizer_options=tokenizer_options,
        engine=arguments.engine,
        json_keys=tuple(arguments.json_keys or [default]),
        input_format=arguments.input_format,
        text_documents=arguments.text_documents,
        text_template=arguments.text_template,
        where=arguments.where,
        skip_rows=arguments.skip_rows,
        skip=arguments.skip,
        limit=arguments.limit,
        min_tokens=arguments.min_tokens,
        max_tokens=arguments.max_tokens,
        append_eod=arguments.append_eod,
        tokens=arguments.tokens_column is not None,
        chat=arguments.chat,
        chat_schema=arguments.chat_schema,
        chat_template=arguments.chat_template,
        chat_date=arguments.chat_date,
        chat_train_on=arguments.chat_train_on,
        split_sentences=arguments.split_sentences,
        lang=arguments.lang,
        keep_newlines=arguments.keep_newlines,
        nltk_data=arguments.nltk_data,
        partitions=arguments.partitions,
        keep_sequential_samples=arguments.keep_sequential_samples,
        shard=arguments.shard,
        holdout=arguments.holdout,
        on_error=on_error,
        quarantine=arguments.quarantine,
        max_errors=arguments.max_errors,
        verify_input=arguments.verify_input,
        overwrite=arguments.overwrite,
        work_folder=arguments.work_folder,
        **{name: value for name, value in optional.items() if value is not None},
    )
    return options, tuple(dict.fromkeys((*arguments.ignored, *unused)))


def _remarks(result: PreprocessResult) -> list[str]:
    """Remarks for the user besides the numbers, one line each."""
    recorded = [manifest.provenance for name, manifest in result.manifests.items() if "/" not in name]
    # The counts are those of the whole run, and equal in the manifests of all its results.
    provenances = [provenance for provenance in recorded if provenance is not None]
    if result.finished_before or not provenances:
        return []
    lines = []
    rows, skipped = sum(file.rows for file in provenances[0].inputs), provenances[0].skipped
    if number := sum(skipped.values()):
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()) if count)
        lines.append(f"{number:,} of {counted(rows, 'row')} left out: {kinds}")
    if filtered := provenances[0].filtered or 0:
        options = provenances[0].options
        given = [name for name in _LEAVE_OUT if options.get(name) is not None]
        causes = [f"by --{name.replace('_', '-')}" for name in given] or ["records of WARC that are not text"]
        why = " and ".join(causes)
        lines.append(f"{filtered:,} of {counted(rows, 'row')} filtered out: {why}")
    if not rows:
        lines.append("the input has no records; the corpus is empty")
    # A type without files cannot read them in another way.
    has_choice = any(manifest.tokenizer and manifest.tokenizer.folder for manifest in result.manifests.values())
    if has_choice and (special := sum(provenance.special_in_text or 0 for provenance in provenances)):
        lines.append(
            f"special tokens in the texts: {special:,}; they were encoded as their ids, as Megatron's tool does;"
            " --special-tokens-in-text plain keeps them as text"
        )
    return lines


def _row(path: str, manifest: mdata.CorpusManifest) -> dict[str, Any]:
    (shard,) = manifest.shards
    return {
        "manifest": path,
        "documents": shard.documents,
        "sequences": shard.sequences,
        "tokens": shard.tokens,
        "type": manifest.dtype,
        "id": manifest.id,
    }


def _estimate_text(facts: dict[str, Any]) -> str:
    """The numbers, followed by the files that would be read, in order."""
    files, left_out = facts["files"], facts["left_out"]
    numbers = {name: value for name, value in facts.items() if name not in ("files", "left_out")}
    width = max(map(len, numbers))
    lines = [f"{name.replace('_', ' '):<{width}}  {_plain(value)}" for name, value in numbers.items()]
    lines += ["", table(("file", "bytes", "format", "compression"), files[:_FILES_SHOWN])]
    lines += [f"and {len(files) - _FILES_SHOWN:,} more (--json lists all)"] if len(files) > _FILES_SHOWN else []
    lines += [f"left out: {count:,} ({reason})" for reason, count in left_out.items()]
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
