"""Twin of mdata/sources/warc.py: all records of a whole file in memory, found line by line.

The result is one (fields of the header, block) for each record.
"""

from __future__ import annotations


def records(text: bytes) -> list[tuple[dict[str, str], bytes]]:
    """Return the header, with names in lower case, and the block of each record of a valid file."""
    found = []
    while text := text.lstrip(b"\r\n"):
        lines: list[str] = []
        while line := text.split(b"\n", 1)[0].removesuffix(b"\r"):
            text = text.split(b"\n", 1)[1]
            words = line.decode(errors="replace")
            if words[0] in " \t":
                lines[-1] += " " + words
            else:
                lines.append(words)
        text = text.split(b"\n", 1)[1]
        fields: dict[str, str] = {}
        for words in lines[1:]:
            name, value = words.split(":", 1)
            fields.setdefault(name.strip().lower(), " ".join(value.split()))
        size = int(fields["content-length"])
        found.append((fields, text[:size]))
        text = text[size:]
    return found
