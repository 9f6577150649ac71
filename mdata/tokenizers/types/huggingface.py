"""HuggingFaceTokenizer: a folder with tokenizer.json.

Ids are those of the default call, including those that the post-processor adds; truncation and padding of the file are
disabled, because a corpus needs whole texts. The end-of-document token is the eos token named in tokenizer_config.json
(or special_tokens_map.json), otherwise its sep token; it is never guessed from the vocabulary. The fingerprint covers
tokenizer.json without the parts that cannot change an id, so reformatting the file or replacing its decoder keeps a
corpus compatible. Nothing is downloaded: a name such as org/name is a path here, and if nothing exists at it, one line
says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from mdata.errors import UsageError, explain_os_error, few
from mdata.tokenizers.base.helpers import LARGEST_ID
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.base.tokenizer_json import Definition, model_vocabulary
from mdata.tokenizers.engines.libraries import EXACT, ExactEngine
from mdata.tokenizers.types.json_backed import JsonTokenizer, errors_name
from mdata.tokenizers.types.transformers5_notes import differences, role_text
from mdata.util.regular_files import regular_file
from mdata.util.stop_signals import LibraryError, library_errors

NAME = "HuggingFaceTokenizer"
MODEL_FILE = "tokenizer.json"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Read only for notes, not stored.
ADDED_FILE, MODEL_CONFIG = "added_tokens.json", "config.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SENTENCEPIECE = "--tokenizer-type SentencePieceTokenizer or Llama2Tokenizer, --tokenizer-model {}"
# (files that indicate another type, the arguments that load it); the first match is used.
_OTHER_TYPES = (
    (("tokenizer.model",), _SENTENCEPIECE),
    (("spiece.model",), _SENTENCEPIECE),
    (("vocab.json", "merges.txt"), "--tokenizer-type GPT2BPETokenizer --vocab-file {} --merge-file {}"),
    (("vocab.txt",), "--tokenizer-type BertWordPieceLowerCase or BertWordPieceCase, --vocab-file {}"),
    (("tiktoken.model",), "--tokenizer-type TikTokenizer --tokenizer-model {}"),
)
_OTHER_ENDINGS = {
    ".model": _SENTENCEPIECE,
    ".tiktoken": "--tokenizer-type TikTokenizer --tokenizer-model {}",
    ".txt": "--tokenizer-type BertWordPieceLowerCase or BertWordPieceCase, --vocab-file {}",
}
_NOT_DECIDING = ("decoder", "padding", "truncation", "version")


class HuggingFaceTokenizer(JsonTokenizer):
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("include_special_tokens", "special_tokens", "special_in_text")

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """See TokenizerType; `spec.model` is a folder, or the tokenizer.json in it."""
        if spec.model is None:
            raise UsageError(f"{NAME} needs a folder", fix="--tokenizer-model FOLDER, one with tokenizer.json")
        files = _read_folder(spec.model)
        with errors_name(spec.model):
            added = _json_object(files, ADDED_FILE) if ADDED_FILE in files else {}
            files.pop(ADDED_FILE, None)
            model_config = files.pop(MODEL_CONFIG, b"{}")
            tokenizer = cls(files, options, engine=EXACT)
            tokenizer._differences = differences(
                tokenizer._definition,
                tokenizer._config,
                special_map=tokenizer._special_map,
                added=added,
                model_type=_model_type(model_config),
            )
            return tokenizer

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """See TokenizerType.

        Args:
            files: those of a tokenizer.
            options: `include_special_tokens`: keep the ids that the post-processor adds (BOS, CLS ...);
                `special_tokens`, `special_in_text`: see TokenizerSpec.
            engine: that of a tokenizer.

        Raises:
            UsageError: a file has the wrong content, or a special token is not in the vocabulary.
        """
        return cls(files, options, engine=engine)

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> None:
        definition = _json_object(files, MODEL_FILE)
        _check_definition(definition, merges=engine == EXACT)
        self._config, self._special_map = (_json_object(files, name) if name in files else {} for name in CONFIG_FILES)
        recorded_options = {"include_special_tokens": True, **options}
        # In transformers that field has the effect of our option.
        plain = {"special_in_text": "plain"} if self._config.get("split_special_tokens") else {}
        if engine == EXACT:
            # The library checks the structure, on which the functions below rely.
            checked = ExactEngine(definition, plain=bool(plain or options.get("special_in_text") == "plain"))
            _check_template(definition.get("post_processor"))
            _check_model(checked.library, definition)
            if not options.get("special_tokens"):
                self._exact = checked
        super().__init__(files, definition, options={**plain, **recorded_options}, engine=engine)
        self.options = recorded_options
        self.eod = self._id_of_role("eos_token", "sep_token")
        begin = role_text("bos_token", self._config, special_map=self._special_map)
        self.bos = self.id_of(begin) if isinstance(begin, str) else None  # its absence is no reason to refuse a file
        self._differences: list[str] = []

    def _file_notes(self) -> list[str]:
        return self._differences

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        return _fingerprint(self._definition, self.eod, options=self.options, plain=self._plain)

    def _id_of_role(self, *roles: str) -> int | None:
        """The id for the first of these roles that has a token in a configuration file."""
        for role in roles:
            text = role_text(role, self._config, special_map=self._special_map)
            if text is not None:
                return self._id_of(text, role)
        return None

    def _id_of(self, text: object, role: str) -> int:
        id = self.id_of(text) if isinstance(text, str) else None
        if id is None:
            raise UsageError(
                f"the tokenizer's {role} is not in its vocabulary",
                found=json.dumps(text)[:80],
                fix=f"add it to the added_tokens of {MODEL_FILE}",
            )
        return id


def _check_definition(definition: Definition, *, merges: bool) -> None:
    """Refuse definitions on which the code below or the library would crash; the library checks the rest."""
    added = definition.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in added):
        raise UsageError(f"{MODEL_FILE} is not a tokenizer", found="added_tokens that are not a list of tokens")
    model = definition.get("model")
    if not isinstance(model, dict):
        return
    if model.get("dropout"):
        raise UsageError(
            f"{MODEL_FILE} uses BPE dropout, so a text has no fixed ids",
            found=f"dropout {model['dropout']}",
            fix='set "dropout" of its model to null',
        )
    if merges and isinstance(model.get("merges"), list) and isinstance(model.get("vocab"), dict):
        _check_merges(model["merges"], model["vocab"], prefix=model.get("continuing_subword_prefix"))


def _check_merges(merges: list[Any], vocabulary: Mapping[str, Any], *, prefix: object) -> None:
    """Refuse merges on which the library panics: results must be entries, second parts must have the prefix."""
    mark = prefix if isinstance(prefix, str) else ""
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            continue  # the library refuses it
        left, right = parts
        made = left + right.removeprefix(mark)
        if not right.startswith(mark) or made not in vocabulary:
            problem = f"{MODEL_FILE}: merge {number} makes {made[:60]!r}, which is not in the vocabulary"
            if made in vocabulary:
                problem = (
                    f"{MODEL_FILE}: merge {number} has a second part without {mark[:20]!r}, which marks parts of words"
                )
            raise UsageError(problem, found=repr(merge)[:80])


def _check_template(part: object) -> None:
    """Refuse a template with a token that has no ids in it: the library panics on it."""
    if not isinstance(part, dict):
        return
    for inner in part.get("processors") or ():
        _check_template(inner)
    tokens_with_ids = part.get("special_tokens") or {}
    for side in ("single", "pair"):
        for step in part.get(side) or ():
            name = step["SpecialToken"].get("id") if "SpecialToken" in step else None
            if name is not None and name not in tokens_with_ids:
                problem = f"{MODEL_FILE} adds a token to every text and does not give its ids"
                raise UsageError(problem, found=repr(name)[:80], expected="the token in special_tokens of the template")


def _ids_of_empty(library: Any) -> list[int]:
    """The ids of an empty text, that is, those that the post-processor adds."""
    try:
        with library_errors():
            return list(library.encode("").ids)
    except LibraryError as error:
        raise UsageError(f"{MODEL_FILE} cannot be used", found=str(error)) from error


def _check_model(library: Any, definition: Definition) -> None:
    """Refuse a model with too large ids, or without an entry for unknown words (the library would fail later)."""
    # The ids of the post-processor need not be in the vocabulary.
    largest = max([*model_vocabulary(definition).values(), *_ids_of_empty(library)], default=0)
    if largest > LARGEST_ID:
        expected = f"ids up to {LARGEST_ID}"
        raise UsageError(f"{MODEL_FILE} has an id that does not fit", found=str(largest), expected=expected)
    model = library.model
    kind, unknown = type(model).__name__, getattr(model, "unk_token", None)
    if kind == "Unigram" and definition["model"].get("unk_id") is None:
        raise UsageError(f"{MODEL_FILE} has no entry for unknown characters", found="a Unigram model without unk_id")
    needed = kind in ("WordPiece", "WordLevel") or (kind == "BPE" and unknown is not None)
    if needed and model.token_to_id(unknown) is None:
        raise UsageError(
            f"{MODEL_FILE} has no entry for what its model cannot spell", found=f"unk_token {unknown!r}"[:80]
        )


def _model_type(model_config: bytes) -> str | None:
    """The model_type of a config.json; None: it has none that can be read, which concerns only the model."""
    import orjson

    with suppress(orjson.JSONDecodeError):
        config = orjson.loads(model_config)
        if isinstance(config, dict) and isinstance(config.get("model_type"), str):
            return str(config["model_type"])
    return None


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    import orjson

    try:
        value = orjson.loads(files[name])
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON", found=str(error), fix="give a folder with an intact one") from error
    if not isinstance(value, dict):
        raise UsageError(f"{name} is not a JSON object", found=type(value).__name__)
    return value


def _fingerprint(definition: Definition, eod: int | None, *, options: Mapping[str, Any], plain: bool) -> str:
    deciding = {key: value for key, value in definition.items() if key not in _NOT_DECIDING}
    model = deciding.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        # Older files write a merge as "a b", newer ones as ["a", "b"]; the ids are the same.
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        deciding["model"] = {**model, "merges": merges}
    content = {
        "type": NAME,
        "definition": deciding,
        "eod": eod,
        "include_special_tokens": options["include_special_tokens"],
    }
    # Left out if it has its default, so that corpora from before the option keep their fingerprint.
    if plain:
        content["special_in_text"] = "plain"
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


def _read_folder(name: str) -> dict[str, bytes]:
    """The files that decide ids, from a folder or from the folder of a tokenizer.json.

    Raises:
        UsageError: nothing exists there, or no tokenizer.json.
    """
    model = Path(name)
    main = model / MODEL_FILE if model.is_dir() else model
    if not model.exists():
        raise UsageError(_missing(name))
    if not main.exists():
        raise UsageError(f"no {MODEL_FILE} in {name}", found=_listed(model), fix=_other_type(model))
    try:
        files = {MODEL_FILE: regular_file(main).read_bytes()}
        for config in (*CONFIG_FILES, ADDED_FILE, MODEL_CONFIG):
            if (main.parent / config).is_file():
                files[config] = (main.parent / config).read_bytes()
    except OSError as error:
        raise explain_os_error(error, f"loading a {NAME}") from error
    ending = _OTHER_ENDINGS.get(main.suffix)
    if ending and not files[MODEL_FILE].lstrip()[:1] == b"{":
        raise UsageError(f"{name} is not a {MODEL_FILE}", fix=ending.format(name))
    return files


def _missing(name: str) -> str:
    if _HUB_NAME.fullmatch(name):
        get = f"hf download {name} --local-dir FOLDER"
        return f"no folder {name} here, and mdata never downloads: get it first ({get}), then name that folder"
    return f"no folder or file {name}: --tokenizer-model names a folder with {MODEL_FILE}; nothing is downloaded"


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return few(names) or "nothing"


def _other_type(folder: Path) -> str | None:
    """The arguments that load the tokenizer in this folder."""
    for names, words in _OTHER_TYPES:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return words.format(*paths)
    if (folder / CONFIG_FILES[0]).is_file():
        return f"a folder that transformers saved with its {MODEL_FILE}; {CONFIG_FILES[0]} alone holds no vocabulary"
    return None
