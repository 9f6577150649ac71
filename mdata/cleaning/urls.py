"""Rules on the addresses that texts come from: blocked domains and endings, and malformed addresses.

The lists openwebtext_domains.txt and openwebtext_endings.txt are those of Megatron-LM's tools/openwebtext; users give
their own with --url-domains and --url-endings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from mdata.errors import UsageError, install_command, os_errors_named
from mdata.util.regular_files import regular_file

_HERE = Path(__file__).parent
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = rf"(?:{_LABEL}\.)+(?:[a-z]{{2,6}}|[a-z0-9-]{{2,}})\.?|\d{{1,3}}(?:\.\d{{1,3}}){{3}}"
# Python's $ also matches before a last newline.
_WELL_FORMED = re.compile(rf"https?://(?:{_HOST})(?::\d+)?(?:/?|[/?]\S+)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class UrlRules:
    """The addresses to refuse.

    Args:
        key: the key or column of the address.
        domains: a file of registered names without the public suffix, such as "example", one a line. Empty: the list of
            OpenWebText.
        endings: a file of endings of paths, such as ".pdf". Empty: the list of OpenWebText.
        min_characters: of an address.
    """

    key: str = "url"
    domains: str = ""
    endings: str = ""
    min_characters: int = 9


class UrlFilter:
    """See `UrlRules`.

    Args:
        rules: the rules.
        compat: as OpenWebText had it: a missing comma made ".7z.ai" of two endings, and domains are compared with their
            case.

    Attributes:
        fingerprint: of both lists.
    """

    def __init__(self, rules: UrlRules, *, compat: bool = False) -> None:
        self.rules, self.compat = rules, compat
        self.domains = frozenset(_lines(rules.domains or _HERE / "openwebtext_domains.txt"))
        endings = _lines(rules.endings or _HERE / "openwebtext_endings.txt")
        if compat and not rules.endings:
            endings = [ending for ending in endings if ending not in (".7z", ".ai")] + [".7z.ai"]
        self.endings = tuple(endings)
        self.fingerprint = blake3("\n".join((*sorted(self.domains), *self.endings)).encode()).hexdigest(length=8)
        self._domain_of = _domain_of()

    def reason(self, url: str) -> str:
        """Why an address is refused; "": it is not."""
        domain = self._domain_of(url)
        if (domain if self.compat else domain.lower()) in self.domains:
            return "url-domain"
        if url.partition("?")[0].lower().endswith(self.endings):
            return "url-ending"
        if len(url) < self.rules.min_characters:
            return "url-min-characters"
        return "" if _WELL_FORMED.match(url) else "url-malformed"


def tldextract_version() -> str:
    """The version of tldextract, whose list of public suffixes decides what a domain is.

    Raises:
        UsageError: it is not installed.
    """
    _domain_of()
    from importlib.metadata import version

    return version("tldextract")


@cache
def _domain_of() -> Any:
    try:
        import tldextract
    except ImportError as error:
        raise UsageError("step url needs tldextract, which is not installed", fix=install_command("web")) from error
    extract = tldextract.TLDExtract(cache_dir=None, suffix_list_urls=())  # the bundled list; no network
    return lambda url: extract(url).domain


def _lines(path: str | Path) -> list[str]:
    with os_errors_named("reading a list of blocked addresses"):
        content = regular_file(path).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", found=str(error), fix="iconv -t UTF-8 FILE > NEW") from error
    return [line.strip().lower() for line in text.splitlines() if line.strip() and not line.startswith("#")]
