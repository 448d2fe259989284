"""Make a virtual environment that lends torch, and all other packages, from this Python.

    python benchmarks/scripts/system_torch.py FOLDER

It downloads nothing. If a package that pyproject.toml requires is missing or too old, it ends with
exit code 1 and the command that installs all of these but torch. It runs before anything is
installed, so that it imports only the standard library.
"""

from __future__ import annotations

import re
import site
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(folder: Path) -> None:
    """Check the packages of this Python, and make the virtual environment `folder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lacking = [one for one in project["dependencies"] if not _installed(one)]
    torch = [one for one in lacking if _name(one) == "torch"]
    others = [one for one in lacking if _name(one) != "torch"]
    if torch:
        builds = "install a build of torch for CUDA or ROCm"
        print(f"{sys.executable} has no {torch[0]}: {builds}", file=sys.stderr)
    if others:
        quoted = " ".join(f"'{one}'" for one in others)
        print(f"packages are missing: {sys.executable} -m pip install {quoted}", file=sys.stderr)
    if lacking:
        print(
            "to measure only the CPU, with a torch of its own: make TORCH=pinned", file=sys.stderr
        )
        sys.exit(1)
    venv.create(folder, with_pip=False)
    binaries = folder.resolve() / "bin"
    (lent,) = folder.glob("lib/python*/site-packages")
    # a path file, because --system-site-packages would look past a Python that is a virtual
    # environment itself
    lines = [f"import site; site.addsitedir({one!r})" for one in site.getsitepackages()]
    (lent / "lent.pth").write_text("\n".join([*lines, str(ROOT)]) + "\n", encoding="utf-8")
    command = binaries / "dpbench"
    command.write_text(
        f"#!{binaries / 'python'}\nfrom dpbench.__main__ import main\nmain()\n", encoding="utf-8"
    )
    command.chmod(0o755)


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ \[]", requirement, maxsplit=1)[0]


def _installed(requirement: str) -> bool:
    """Return whether the package is installed, and not older than the requirement's `>=`."""
    try:
        version = metadata.version(_name(requirement))
    except metadata.PackageNotFoundError:
        return False
    least = re.search(r">=([0-9.]+)", requirement)
    return least is None or _numbers(version) >= _numbers(least[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", version.partition("+")[0])[:3])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
