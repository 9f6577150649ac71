"""The language of a text, by a library that gives the same answer every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mdata.errors import UsageError, install_command

# (code of the language, probability) of a text; "": not recognized
Identify = Callable[[str], tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class LanguageRules:
    """The languages to keep.

    Args:
        keep: their codes, such as "en".
        min_probability: of the language, according to the identifier.
        identifier: "py3langid", "langdetect", or "cld2".
        first_characters: length of the text that is examined; -1: all.
    """

    keep: tuple[str, ...] = ("en",)
    min_probability: float = 0.0
    identifier: str = "py3langid"
    first_characters: int = 2000


def language_reasons(texts: list[str], rules: LanguageRules, identify: Identify) -> list[str]:
    """Why each text is removed: "language-de", or "language-unknown"; "": it stays."""
    first = rules.first_characters if rules.first_characters >= 0 else None
    reasons = []
    for text in texts:
        language, probability = identify(text[:first])
        sure = language and probability >= rules.min_probability
        kept = sure and language in rules.keep
        reasons.append("" if kept else f"language-{language}" if sure else "language-unknown")
    return reasons


def load_identifier(name: str) -> tuple[Identify, str]:
    """(an identifier, its version).

    Raises:
        UsageError: it is unknown or not installed.
    """
    if name not in _LOADERS:
        raise UsageError(f"language identifier {name}", expected=" or ".join(_LOADERS))
    try:
        return _LOADERS[name]()
    except ImportError as error:
        fix = "pip install pycld2" if name == "cld2" else install_command("web")
        raise UsageError(f"step language needs {name}, which is not installed", fix=fix) from error


def _py3langid() -> tuple[Identify, str]:
    import py3langid
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    model: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def identify(text: str) -> tuple[str, float]:
        language, probability = model.classify(text)
        return str(language), float(probability)

    return identify, str(py3langid.__version__)


def _langdetect() -> tuple[Identify, str]:
    """langdetect draws random numbers; a fixed seed for each text makes it deterministic."""
    from importlib.metadata import version

    import langdetect

    langdetect.DetectorFactory.seed = 0

    def identify(text: str) -> tuple[str, float]:
        try:
            likeliest = langdetect.detect_langs(text)[0]
        except langdetect.LangDetectException:
            return "", 0.0
        return str(likeliest.lang), float(likeliest.prob)

    return identify, version("langdetect")


def _cld2() -> tuple[Identify, str]:
    from importlib.metadata import version

    import pycld2

    def identify(text: str) -> tuple[str, float]:
        # It refuses control characters, which belong to no language.
        clean = "".join(character if character.isprintable() or character in "\t\n\r" else " " for character in text)
        try:
            reliable, _, details = pycld2.detect(clean)
        except pycld2.error:
            return "", 0.0
        _, code, percent, _ = details[0]
        return ("", 0.0) if code == "un" else (str(code), percent / 100 if reliable else 0.0)

    return identify, version("pycld2")


_LOADERS: Mapping[str, Callable[[], tuple[Identify, str]]] = MappingProxyType(
    {"py3langid": _py3langid, "langdetect": _langdetect, "cld2": _cld2}
)
