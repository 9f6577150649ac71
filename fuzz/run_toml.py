"""The reader of a run's TOML file: a configuration or a UsageError, whatever the bytes.

The first byte chooses whether the text stands alone or behind a whole configuration whose keys it may spell again in
sections of other names; what follows a NUL are overrides, one a line. What is read can be written and read again.
"""

from __future__ import annotations

from fuzz.harness import scratch
from mdata.errors import UsageError
from trainer.config.parse import dump_config, load_config, value_problems

WHOLE = """
[run]
folder = "out"
[data]
blend = "x.json"
[model]
num_layers = 2
hidden_size = 8
num_heads = 2
[optimizer]
lr = 1e-3
[train]
sequence_length = 8
global_batch = 4
micro_batch = 2
steps = 3
"""


def check(data: bytes) -> None:
    """One file and its overrides."""
    behind, (text, _, more) = bool(data[:1] and data[0] & 1), data[1:].partition(b"\0")
    path = scratch() / "run.toml"
    path.write_bytes((WHOLE.encode() if behind else b"") + text)
    overrides = more.decode(errors="surrogateescape").splitlines()
    try:
        config = load_config(path, overrides)
    except UsageError as error:
        assert str(path) in str(error)
        return
    assert value_problems(config) == []
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config
