"""Folders written by `save_to_disk` of Hugging Face datasets: which Arrow files make a dataset, and their order.

A saved dataset is a folder with `state.json`, which lists the data files in order, and `dataset_info.json`; a saved
`DatasetDict` is a folder with `dataset_dict.json` and a saved dataset for each split. Files that later calls left there
(`cache-*.arrow`) are not part of it. Splits are never read together, because one of them is usually for testing. Not
here: loading by name, indices beside the data (`save_to_disk` has written none since version 2.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdata.errors import UsageError, explain_os_error
from mdata.sources.folder_files import SkippedFiles
from mdata.util.regular_files import regular_file

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_MOST_BYTES = 64 << 20


def without_metadata(paths: Sequence[Path], skipped: SkippedFiles) -> list[Path]:
    """The files of a folder, with the data files of saved datasets in their order and without their other files.

    Args:
        paths: the files of the folder, sorted.
        skipped: receives files beside those of a saved dataset.

    Raises:
        UsageError: a data file is missing, more than one split is there, or the description cannot be read.
    """
    folders = {path.parent for path in paths}
    saved = {folder: _data_files(folder) for folder in sorted(folders) if (folder / _STATE).is_file()}
    saved = {folder: files for folder, files in saved.items() if files is not None}
    above = {folder for folder in {*folders, *(entry.parent for entry in saved)} if (folder / _SPLITS).is_file()}
    if not saved and not above:
        return list(paths)
    there = set(paths)
    first = {folder: next((file for file in files or () if file in there), None) for folder, files in saved.items()}
    taken: list[Path] = []
    for path in paths:
        files = saved.get(path.parent)
        if (path.name in (_STATE, _INFO) and files is not None) or (path.name == _SPLITS and path.parent in above):
            continue
        if files is None:
            taken.append(path)
        elif path not in files:
            skipped.add("not of the dataset", str(path))
        elif path == first[path.parent]:
            # All of them at the position of the first.
            taken += [entry for entry in files if entry in there]
    _check_splits(taken, saved, above)
    return taken


def _check_splits(taken: Sequence[Path], saved: Mapping[Path, Any], above: set[Path]) -> None:
    splits = sorted({path.parent for path in taken if path.parent in saved and path.parent.parent in above})
    for parent in sorted(above):
        inside = [str(split) for split in splits if split.parent == parent]
        if len(inside) > 1:
            raise UsageError(
                f"{parent} is a saved dataset with several splits",
                found=", ".join(Path(folder).name for folder in inside),
                expected="one of them",
                fix=f"give {next((folder for folder in inside if folder.endswith('train')), inside[0])}",
            )


def _data_files(folder: Path) -> dict[Path, None] | None:
    """The data files of a saved dataset in order; None: not a saved dataset."""
    state = _read(folder / _STATE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(listed, list) or not (folder / _INFO).is_file():
        return None
    names = [item.get("filename") if isinstance(item, dict) else None for item in listed]
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise UsageError(f"{folder / _STATE} lists data files without a name", fix="save the dataset again")
    if state.get("_indices_data_files"):
        raise UsageError(
            f"{folder} is a saved dataset with indices beside its data",
            fix="load it with datasets, call flatten_indices() and save it again",
        )
    files = [folder / str(name) for name in names]
    if missing := [path.name for path in files if not path.is_file()]:
        raise UsageError(
            f"{folder} is a saved dataset with missing files",
            found=f"{len(missing)} of {len(files)}, such as {missing[0]}",
            fix="copy or save the dataset again",
        )
    return dict.fromkeys(files)


def _read(path: Path) -> Any:
    try:
        with regular_file(path).open("rb") as file:
            text = file.read(_MOST_BYTES)
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
