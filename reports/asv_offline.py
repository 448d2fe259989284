"""An asv plugin that makes the published site work without a network, and from a file.

asv's page loads ten files from public servers, and where it cannot it shows nothing but an error.
The files are also in npm packages; benchmarks/history.sh installs those in .asv/vendor, and `asv
publish`, which loads this plugin, puts copies beside the page. asv's own interpreter runs this: it
imports neither torch nor dpbench.

The page also requests its data, which a browser refuses to a page that was opened from a file.
After `asv publish`, `python reports/asv_offline.py .asv/html` therefore writes the data as a script
beside the page.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from asv.console import log
from asv.publishing import OutputPublisher

PACKAGES = (
    "jquery@3.3.1",
    "flot@0.8.3",
    "flot-orderbars@1.0.0",
    "stupid-table-plugin@1.1.3",
    "blueimp-md5@2.19.0",
    "bootstrap@3.1.1",
)
FILES = {
    "jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "jquery.flot.min.js": "flot/jquery.flot.js",
    "jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.min.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}
"""What the page calls a file -> where npm puts it."""

FIRST = ("steps", "verbs")
"""The groups of benchmarks that the page shows first."""
EFFORTS = "efforts.json"
"""The file of asv_history.py with the effort of each result, beside the folder of the page."""
DATA, ANSWERS = "asv_data.js", "asv_files.js"
"""The scripts with the data of the page, and with the answers to the page's requests, by their
names in the site.
"""
_OWN = re.compile(r'(?=<script language="javascript" type="text/javascript"\s+src="asv.js">)')
_REMOTE = re.compile(r'<(?:script|link)\b[^>]*?\b(?:src|href)="(https?://[^"]+)"[^>]*>')
_CHECKS = re.compile(r'\s(?:integrity|crossorigin|referrerpolicy)="[^"]*"')


def localise(html: Path, modules: Path) -> str:
    """Replace what html/index.html loads from elsewhere by copies out of `modules`.

    Return one line to tell.

    Either every file is replaced or none: half a page would only hide what is missing.
    """
    page = html / "index.html"
    text = page.read_text(encoding="utf-8")
    names = [url.rpartition("/")[2] for url in _REMOTE.findall(text)]
    if unknown := sorted(set(names) - FILES.keys()):
        return (
            f"the page needs a network: no local file is known for {', '.join(unknown)}; see FILES"
            f" in {__file__}"
        )
    if not all((modules / FILES[name]).is_file() for name in names):
        install = f"npm install --ignore-scripts --prefix {modules.parent} {' '.join(PACKAGES)}"
        return (
            "the page needs a network; to make it work without, run this and publish again:"
            f" {install}"
        )
    vendor = html / "vendor"
    vendor.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(modules / FILES[name], vendor / name)
    page.write_text(_REMOTE.sub(_local, text), encoding="utf-8")
    return f"the page needs no network: {len(names)} files copied to {vendor}"


def _local(tag: re.Match[str]) -> str:
    """Return the tag with the address of the local copy, without the original's checks."""
    url = tag.group(1)
    return _CHECKS.sub("", tag.group().replace(url, f"vendor/{url.rpartition('/')[2]}"))


def embed(html: Path) -> str:
    """Write the data of the page in the folder `html` as a script, which the page loads.

    Return one line to tell.

    The data are the JSON files that asv published, the stored trials that benchmarks listed in
    `trials` beside the folder, and the commits whose result is doubtful, by benchmark: those of
    quick mode, and those with NOISY trials. The page draws doubtful results in grey. It shows steps
    and verbs first, and no benchmark without a result. A page that loads the script already gets
    only new data.
    """
    page = html / "index.html"
    text = page.read_text(encoding="utf-8")
    tags = "".join(f'<script src="{name}"></script>\n    ' for name in (DATA, ANSWERS))
    if tags not in text:
        text, places = _OWN.subn(tags, text, count=1)
        if not places:
            return "the page needs a server: it loads no asv.js, so this version of asv is unknown"
    files = {
        path.relative_to(html).as_posix(): _plain(path) for path in sorted(html.rglob("*.json"))
    }
    if "index.json" in files:
        files["index.json"]["benchmarks"] = _shown(files)
    trials = _trials(html.parent / "trials")
    doubtful = _doubtful(html.parent / EFFORTS, trials)
    data = "".join(
        f"const {name} = {json.dumps(value)};\n"
        for name, value in (
            ("asvFiles", files),
            ("asvTrials", trials),
            ("asvDoubtful", doubtful),
        )
    )
    (html / DATA).write_text(data, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name(ANSWERS), html / ANSWERS)
    page.write_text(text, encoding="utf-8")
    return f"the page needs no server: {len(files)} files are in {html / DATA}"


def _shown(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the benchmarks that have a result in some commit, those of `FIRST` first."""
    known = files["index.json"]["benchmarks"]
    measured = [
        name
        for name in known
        if any(value is not None for _, value in files.get(f"graphs/summary/{name}.json", ()))
    ]
    ordered = sorted(measured, key=lambda name: name.partition(".")[0] not in FIRST)
    return {name: known[name] for name in ordered}


def _doubtful(
    file: Path, trials: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[str]]:
    """Return the commits of each benchmark whose result is quick or from NOISY trials."""
    found: dict[str, set[str]] = {}
    efforts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for commit, notes in efforts.items():
        for benchmark, note in notes.items():
            if note["effort"] == "quick":
                found.setdefault(benchmark, set()).add(commit)
    for benchmark, entries in trials.items():
        noisy = {entry["commit"] for entry in entries if entry.get("noisy")}
        if noisy:
            found.setdefault(benchmark, set()).update(noisy)
    return {benchmark: sorted(commits) for benchmark, commits in found.items()}


def _plain(file: Path) -> Any:
    """Return the content of a JSON file.

    Asv writes values that JSON lacks as NaN, which become null.
    """
    return json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda name: None)


def _trials(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of all lists in a folder by benchmark.

    Of equal commits and parameters, the last counts.
    """
    found: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.setdefault(entry["benchmark"], {})[entry["commit"], *entry["params"]] = entry
    return {benchmark: list(entries.values()) for benchmark, entries in found.items()}


class Offline(OutputPublisher):
    """The hook that `asv publish` calls."""

    name: ClassVar[str] = "offline"
    description: ClassVar[str] = "Make the page work without a network"

    @classmethod
    def publish(cls, conf: Any, repo: Any, benchmarks: Any, graphs: Any, revisions: Any) -> None:
        """Rewrite the page that asv has just copied."""
        html = Path(conf.html_dir)
        log.info(localise(html, html.parent / "vendor" / "node_modules"))


if __name__ == "__main__":
    print(embed(Path(sys.argv[1])) if sys.argv[1:] else " ".join(PACKAGES))
