"""Let this Python's environment see the packages of another one: `python scripts/see_environment.py .venv`.

A .pth file names the other environment's folder of packages and has its own .pth files run, which is how an editable
install is found. What is installed here comes first. Both must be of one version of Python.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> int:
    """Write the .pth file."""
    folder = Path(sys.argv[1]).resolve() / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not there: another version of Python, or no environment")
    here = Path(sysconfig.get_path("purelib"))
    (here / "zz_other_environment.pth").write_text(f"import site; site.addsitedir({str(folder)!r})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
