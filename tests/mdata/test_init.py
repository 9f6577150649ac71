"""What `import mdata` offers, and the names of before 0.1 that it still understands."""

from __future__ import annotations

import pytest

import mdata
from tests.helpers.corpora import write_pair


def test_every_public_name_exists():
    named = ("open_dataset", "Loader", "BatchPlan", "merge", "split", "sample", "shuffle", "fetch", "stage")
    assert {*named} <= {*dir(mdata)}
    for name in mdata.__all__:
        assert getattr(mdata, name) is not None, name
    with pytest.raises(AttributeError, match="nothing"):
        mdata.nothing  # noqa: B018


def test_old_names_work_with_one_warning_that_names_the_new_form(tmp_path):
    write_pair(tmp_path / "a", [[50]] * 10)
    new = mdata.open_dataset(tmp_path / "a", sequence_length=8, kind="document")
    with pytest.warns(FutureWarning, match=r"mdata\.open_dataset, with the same arguments") as said:
        old = mdata.open(tmp_path / "a", sequence_length=8, kind=mdata.Document())
    assert len(said) == 1 and old.data_id == new.data_id
    with pytest.warns(FutureWarning, match=r"DatasetOptions\.from_keys"):
        options = mdata.options_from_keys(sequence_length=8, kind="document")
    assert options == new.options
    for given, named in (
        ((tmp_path / "a", options), {}),
        ((tmp_path / "a",), {"options": options, "evaluation": True}),
    ):
        with pytest.warns(FutureWarning, match=r"mdata\.Dataset\.from_options\(path, options\)") as said:
            assert mdata.open_dataset(*given, **named).data_id == new.data_id
        assert len(said) == 1 and said[0].filename == __file__
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'sequence_length'"):
        mdata.open_dataset(tmp_path / "a")
    assert not {"open", "options_from_keys"} & {*dir(mdata), *mdata.__all__}
