"""The files of a Hugging Face folder, and the error if it is missing or has another kind of tokenizer.

Nothing is downloaded: a name such as org/name is a path here, and if nothing exists at it, one line says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from mdata.errors import UsageError, explain_os_error, few
from mdata.util.regular_files import regular_file

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


def read_folder(name: str, type: str) -> dict[str, bytes]:
    """The files that decide ids, from a folder or from the folder of a tokenizer.json.

    Args:
        name: as the user gave it.
        type: of the tokenizer, for errors.

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
        raise explain_os_error(error, f"loading a {type}") from error
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
