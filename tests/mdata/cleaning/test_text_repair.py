"""ftfy behind the fast path gives what ftfy gives; punctuation; languages and addresses; what is not installed."""

from __future__ import annotations

import builtins
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.cleaning import languages, urls
from mdata.cleaning.clean import CleanRules
from mdata.cleaning.languages import LanguageRules, language_reasons, load_identifier
from mdata.cleaning.text_repair import fixed, plain_punctuation
from mdata.cleaning.urls import UrlFilter, UrlRules
from mdata.errors import UsageError

PIECES = [
    "sch\u00c3\u00b6n", "voil\u00c3\u00a0", "&amp;", "&lt;b&gt;", "<b>", "\r\n", "\n", "plain words ", "\u201cq\u201d",
    "\u00e9", "e\u0301", "\x00", "\ufb01", "\uff21", "\t", "\x1b[0m", "\ufeff", "\u2028", "&", "<", "\u200b", " ",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_texts_are_fixed_as_ftfy_does(text):
    ftfy = pytest.importorskip("ftfy")
    assert fixed([text, "clean", text]) == [ftfy.fix_text(text), "clean", ftfy.fix_text(text)]


def test_long_lines_are_fixed_as_ftfy_does():
    ftfy = pytest.importorskip("ftfy")
    texts = ["a" * 999_999 + "sch\u00c3\u00b6n &amp; <\n&amp;"]
    assert fixed(texts) == [ftfy.fix_text(text) for text in texts]


def test_punctuation_becomes_that_of_ascii():
    texts = ["\u201ca\u201d \u2018b\u2019\u2026 c\u2013d\u2014e\u00a0f\u3000\u00abg\u00bb", "plain", "\u00e9"]
    assert plain_punctuation(texts) == ['"a" \'b\'... c-d-e f "g"', "plain", "\u00e9"]


@pytest.mark.parametrize("name", ["py3langid", "langdetect"])
def test_languages_stay_or_fall_by_name(name):
    pytest.importorskip(name)
    identify, version = load_identifier(name)
    english = "The old teacher crosses the market every day and asks for the price of the oranges."
    german = "Der alte Fischer repariert jeden Morgen sein Netz, weil der Wind in der Nacht stark war."
    texts = [english, german, english, ""]
    rules = LanguageRules(keep=("en",), first_characters=-1)
    first = language_reasons(texts, rules, identify)
    assert first[:3] == ["", "language-de", ""] and first[3].startswith("language-") and version
    assert language_reasons(texts, rules, load_identifier(name)[0]) == first
    sure = LanguageRules(keep=("en",), min_probability=1.1)
    assert set(language_reasons(texts, sure, identify)) == {"language-unknown"}


def test_addresses_are_judged_in_order(tmp_path):
    pytest.importorskip("tldextract")
    reasons = {
        "https://en.wikipedia.org/x.pdf": "url-domain", "https://WWW.GOOGLE.co.uk/": "url-domain",
        "https://notgoogle.com/": "", "https://a.example/b.7z": "url-ending",
        "https://a.example/b.AI?x=1": "url-ending",
        "https://a.example/?b.pdf": "", "ftp://x.y": "url-malformed", "http://a": "url-min-characters",
        "https://192.168.0.1:80/x": "", "https://a b.example/": "url-malformed", "HTTPS://x.org": "",
    }  # fmt: skip
    filter = UrlFilter(UrlRules())
    assert {url: filter.reason(url) for url in reasons} == reasons
    compat = UrlFilter(UrlRules(), compat=True)
    assert [compat.reason(f"https://a.example/{end}") for end in ("b.7z", "b.ai", "b.7z.ai")] == ["", "", "url-ending"]
    (tmp_path / "names").write_text("# mine\nexample\n")
    own = UrlFilter(UrlRules(domains=str(tmp_path / "names")))
    assert own.reason("https://a.example.com/") == "url-domain" and own.reason("https://google.com/") == ""
    assert own.fingerprint != filter.fingerprint
    (tmp_path / "names").write_bytes(b"caf\xe9\n")
    with pytest.raises(UsageError, match="names is not UTF-8"):
        UrlFilter(UrlRules(domains=str(tmp_path / "names")))


@pytest.mark.parametrize(
    ("step", "library"),
    [("fix", "ftfy"), ("language", "py3langid"), ("url", "tldextract"), ("openwebtext", "langdetect")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch, step, library):
    real = builtins.__import__

    def without(name: str, *arguments: object, **more: object) -> object:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real(name, *arguments, **more)  # type: ignore[arg-type]

    urls._domain_of.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, library, raising=False)
    rules = CleanRules(steps=(step,), openwebtext_tasks=("remove_512",))
    with pytest.raises(UsageError, match=rf"{library}, which is not installed(?s:.*)\[web\]"):
        rules.record()
    assert languages._LOADERS.keys() == {"py3langid", "langdetect", "cld2"}


def test_an_unknown_identifier_is_refused():
    with pytest.raises(UsageError, match="py3langid or langdetect or cld2"):
        load_identifier("guess")
