"""An asv plugin that makes the published site work without a network.

asv's page loads ten files from public servers, and where it cannot it shows nothing but an error. The files are
also in npm packages; benchmarks/history.sh installs those in .asv/vendor, and `asv publish`, which loads this
plugin, puts copies beside the page. asv's own interpreter runs this: it imports neither torch nor dpbench.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

from asv.console import log
from asv.publishing import OutputPublisher

PACKAGES = (
    "jquery@3.3.1", "flot@0.8.3", "flot-orderbars@1.0.0", "stupid-table-plugin@1.1.3", "blueimp-md5@2.19.0",
    "bootstrap@3.1.1",
)  # fmt: skip
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

_REMOTE = re.compile(r'<(?:script|link)\b[^>]*?\b(?:src|href)="(https?://[^"]+)"[^>]*>')
_CHECKS = re.compile(r'\s(?:integrity|crossorigin|referrerpolicy)="[^"]*"')


def localise(html: Path, modules: Path) -> str:
    """Replace what html/index.html loads from elsewhere by copies out of `modules`; return one line to tell.

    Either every file is replaced or none: half a page would only hide what is missing.
    """
    page = html / "index.html"
    text = page.read_text(encoding="utf-8")
    names = [url.rpartition("/")[2] for url in _REMOTE.findall(text)]
    if unknown := sorted(set(names) - FILES.keys()):
        return f"the page needs a network: no local file is known for {', '.join(unknown)}; see FILES in {__file__}"
    if not all((modules / FILES[name]).is_file() for name in names):
        install = f"npm install --ignore-scripts --prefix {modules.parent} {' '.join(PACKAGES)}"
        return f"the page needs a network; to make it work without, run this and publish again: {install}"
    vendor = html / "vendor"
    vendor.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(modules / FILES[name], vendor / name)
    page.write_text(_REMOTE.sub(_local, text), encoding="utf-8")
    return f"the page needs no network: {len(names)} files copied to {vendor}"


def _local(tag: re.Match[str]) -> str:
    """Return the tag with its copy's address, and without the checks that belong to the original."""
    url = tag.group(1)
    return _CHECKS.sub("", tag.group().replace(url, f"vendor/{url.rpartition('/')[2]}"))


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
    print(*PACKAGES)
