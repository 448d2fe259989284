"""axe-core, which checks a page's accessibility: npm fetches one version, checked by its hash.

python tests/axe.py     fetch it now, so that no test needs a network; fail if impossible
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "4.10.3"
INTEGRITY = (
    "sha512-Xm7bpRXnDSX2YE2YFfBk2FnF0ep6tmG7xPh8iHee8MIc"
    "rgq762Nkce856dYtJYLkuIoYZvGfTs/PbZhideTcEg=="
)
"""The hash that the registry states for the package of this version."""
FILE = Path(__file__).parent.parent / "build" / f"axe-core-{VERSION}.min.js"
"""The script, in a folder that git ignores, so that it is fetched once."""


class UnavailableError(Exception):
    """The script is not here, and cannot be fetched."""


def script() -> str:
    """Return the text of axe-core, which is fetched if it is not here.

    Raises UnavailableError if that is impossible.

    Raises ValueError if the fetched package is not the expected one.
    """
    if not FILE.exists():
        _fetch()
    return FILE.read_text(encoding="utf-8")


def _fetch() -> None:
    npm = shutil.which("npm")
    if not npm:
        raise UnavailableError("there is no npm on this system")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"axe-core@{VERSION}", "--silent", "--pack-destination", folder]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        packages = [*Path(folder).glob("*.tgz")]
        if done.returncode or len(packages) != 1:
            raise UnavailableError(
                f"npm cannot fetch axe-core {VERSION}: {done.stderr.strip()[-200:]}"
            )
        found = (
            f"sha512-{base64.b64encode(hashlib.sha512(packages[0].read_bytes()).digest()).decode()}"
        )
        if found != INTEGRITY:
            raise ValueError(
                f"the package of axe-core {VERSION} has the hash {found} instead of {INTEGRITY}"
            )
        with tarfile.open(packages[0]) as package:
            content = package.extractfile("package/axe.min.js")
            assert content
            FILE.parent.mkdir(exist_ok=True)
            partial = Path(folder) / FILE.name
            partial.write_bytes(content.read())
            shutil.copyfile(partial, FILE.with_suffix(".part"))
            FILE.with_suffix(".part").replace(FILE)


if __name__ == "__main__":
    script()
    print(FILE)
