"""Punkt tables written for these tests: every rule of the splitter has a word here that triggers it."""

from __future__ import annotations

from mdata.sentences.punkt_tables import FILES

ABBREVIATIONS = ("mr", "z.b", "e.g", "bzw", "st", "\u00fc.a", ". . ", "3", "\u03bf\u03c2", "\u03c3\u03b1", "i\u0307")
COLLOCATIONS = (("st", "john"), ("##number##", "international"), (".", "x"), ("a", "b."), ("z", "##number##"))
# Bits: 2 upper at a start, 4 upper inside, 8 upper unknown; 16, 32, 64 the same for lower.
CONTEXTS = {
    "then": 34, "bach": 4, "paris": 12, "the": 126, "and": 96, "\u00fcber": 34, "who": 64, "\u00e9t\u00e9": 32, "b": 0,
    "once": 16, "john": 6, "##number##": 32, "i\u0307x": 32, "\u03bf\u03b4\u03bf\u03c2": 32, "x.": 98, "k": 14,
}  # fmt: skip
STARTERS = ("he", "the", "\u00e9t\u00e9", "it")
WORDS = (
    "Mr.",
    "z.B.",
    "e.g.",
    "bzw.",
    "St.",
    "\u00dc.A.",
    "A.",
    "\u00d6.",
    "Then",
    "then",
    "Bach",
    "Paris",
    "The",
    "and",
)
WORDS += (
    "\u00dcber",
    "who",
    "He",
    "\u00c9t\u00e9",
    "3",
    "3.",
    "-1,5.",
    "\u0663.",
    "John",
    "international",
    "x",
    "X.",
    "K",
)
WORDS += (
    "\u03a3\u0391.",
    "\u039f\u03a3.",
    "\u039f\u0394\u039f\u03a3",
    "\u0130.",
    "\u0130x",
    "b.",
    "a-mr.",
    "_.",
    "\u0301.",
    "It",
    "once",
)


def files(**changed):
    """The four files; a keyword without the ending (`abbrev_types`) puts other content in the place of one."""
    content = (
        "\n".join(ABBREVIATIONS),
        "\n".join("\t".join(pair) for pair in COLLOCATIONS),
        "\n".join(f"{word}\t{bits}" for word, bits in CONTEXTS.items()) + "\n",
        "\n".join(STARTERS),
    )
    found = dict(zip(FILES, (text.encode() for text in content), strict=True))
    for name, data in changed.items():
        full = next(known for known in FILES if known.startswith(name))
        found[full] = data if isinstance(data, bytes) else data.encode()
    return found


def write(folder, **changed):
    """The files in a folder of NLTK data, as language "ours"; the folder."""
    place = folder / "tokenizers" / "punkt_tab" / "ours"
    place.mkdir(parents=True)
    for name, content in files(**changed).items():
        (place / name).write_bytes(content)
    return folder
