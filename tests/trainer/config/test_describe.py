"""Every setting with its default and comment, as in the sections."""

from __future__ import annotations

import re
import tomllib

from trainer.config.describe import default_toml, describe, section_texts
from trainer.config.parse import key_names, parse_config, section_of


def test_every_setting_has_a_comment_of_its_own():
    keys = describe()
    assert [key.name for key in keys] == key_names()
    assert all(key.comment and key.expected for key in keys)
    by_name = {key.name: key for key in keys}
    assert by_name["run.seed"].comment == "seed of the initial weights and of the data order"
    assert by_name["run.seed"].default == 1234 and by_name["run.folder"].default is None
    assert by_name["run.folder"].required and by_name["run.folder"].not_set is None
    heads = by_name["model.num_kv_heads"]
    assert (heads.default, heads.required, heads.not_set) == (None, False, "derived from num_heads")
    assert heads.comment == "key and value heads"
    assert "gelu_erf" in by_name["model.activation"].comment  # it stands on the field's second line
    assert set(section_texts()) == {name.rpartition(".")[0] for name in key_names()}


def test_the_defaults_as_toml_are_the_defaults():
    text = re.sub(r"^# (\w+ = (?!\.\.\.$))", r"\1", default_toml(), flags=re.MULTILINE)
    needed = {"folder": '"run"', "blend": '"mix"', "lr": "0.1"}
    text = re.sub(r"^(\w+) = \.\.\.$", lambda key: f"{key[1]} = {needed.get(key[1], '8')}", text, flags=re.MULTILINE)
    config, problems = parse_config(tomllib.loads(text))
    assert config and not problems
    for key in describe():
        section, _, name = key.name.rpartition(".")
        if not key.required:
            owner = section_of(config, section)  # None: its keys are not set by default, so the file lacks it
            assert (None if owner is None else getattr(owner, name)) == key.default, key.name
