"""The background job of a run on Ray; started by `mtrain launch ray`, not by users."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mdata.errors import MdataError, StoppedError
from trainer.launching.job import load_job, record_end
from trainer.launching.on_ray import RayOptions, train_on_ray

from .console import Console
from .mtrain_launch import variables


def main(argv: Sequence[str]) -> int:
    """Train on the nodes of the job in a run folder, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--address", default="auto")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--env", action="append", default=[])
    options = vars(parser.parse_args(argv))
    options["env"] = variables(options["env"])
    job, console = load_job(options.pop("run_folder")), Console("mtrain")
    assert job is not None, "mtrain launch has written the record"
    try:
        return train_on_ray(job, RayOptions(**options), tell=lambda text: console.note(f"mtrain: {text}"))
    except (MdataError, StoppedError) as error:
        console.error(str(error))
        record_end(os.environ, code=error.exit_code, who=f"the job on {os.uname().nodename}", message=str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
