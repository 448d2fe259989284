"""Gallery: the reports of real runs in reports/, and reports/index.html, the page that lists them.

    python -m benchmarks.scripts.gallery NAME --title TITLE --about "SENTENCES"
        [--store dpbench.db] [--run RUN]
    python -m benchmarks.scripts.gallery

The first form writes reports/NAME: the page of the run, its trials (trials.jsonl.gz, which `dpbench
compare` reads), and run.json with the facts for the list. Both forms then write the list, from the
folders that have a run.json.
"""

from __future__ import annotations

import argparse
import gzip
import re
from pathlib import Path

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dpbench.analysis.summary import FAKE_GPU
from dpbench.api import reports, stored
from dpbench.records import fake, words
from dpbench.report import naming, page, templates
from dpbench.store import Store
from dpbench.store.export import formats

REPORTS = Path(__file__).parent.parent.parent / "reports"
FACTS, TRIALS = "run.json", "trials.jsonl.gz"
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src {{ allowed }}">
<title>dpbench: reports of real runs</title>
<style>{{ style }}</style>
</head>
<body>
<main class="runs">
<h1>dpbench: reports of real runs</h1>
<p>{% if only_cpu %}Every run here was made on a CPU, and says nothing about GPUs. {% endif %}
The labels of a run qualify its figures;
NOISY says that other processes used the cores or a GPU.</p>
{% for name, one in entries %}
<section id="{{ name }}">
<h2>{{ one.title }}</h2>
<p>{{ one.about }}</p>
<p>{% for label in one.labels %}<span class="badge {{ label }}">{{ label }}</span> {% endfor %}</p>
<p class="note">{{ one.date }} on {{ one.machine }}; {#-
#} {{ one.results }} of {{ one.cases }} cases have a result.</p>
{% for answer in one.answers %}
<p>{{ answer }}</p>
{% endfor %}
<div class="command"><code>{{ one.command }}</code></div>
<p><a href="{{ name }}/index.html">Page of {{ one.title }}</a>,
<a href="{{ name }}/{{ trials }}">its trials</a></p>
</section>
{% endfor %}
{% if studies %}
<section id="studies">
<h2>Earlier studies</h2>
<ul>
{% for name, title in studies %}
<li><a href="{{ name }}/README.md">{{ title }}</a></li>
{% endfor %}
</ul>
</section>
{% endif %}
</main>
</body>
</html>
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The facts on one run in the list.

    `started_s` is in seconds since the epoch, and `about` has its paragraph.
    """

    title: str
    about: str
    started_s: float
    machine: str
    labels: tuple[str, ...]
    answers: tuple[str, ...]
    command: str
    results: int
    cases: int

    @property
    def date(self) -> str:
        """Return the start of the run as text, in UTC."""
        return words.minute(self.started_s)


def add(folder: Path, title: str, about: str, store: Path, run_id: str | None) -> None:
    """Write the page, the trials and the facts of a stored run into a folder.

    Raises ValueError for a run on fake GPUs, which no reader must take for one on GPUs.
    """
    run, trials, unreadable = stored.read(store, run_id)
    report = reports.report_of(run, trials, unreadable=unreadable)
    if any(row.on_fake_gpus for row in report.rows):
        raise ValueError(f"the run {run.id[:12]} is labelled {FAKE_GPU}: {fake.WHY}")
    facts = dict(naming.facts(report))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(page.render(report), encoding="utf-8")
    with Store.read(store) as opened:
        text = "".join(formats.jsonl(run.id, opened.trials(run.id)))
    # without a name and a time in its header, a file of equal trials has equal bytes
    (folder / TRIALS).write_bytes(gzip.compress(text.encode(), mtime=0))
    entry = Entry(
        title=title,
        about=about,
        started_s=report.run.started,
        machine=f"{facts['host']}, GPUs: {facts['GPUs']}",
        labels=naming.labels(report.rows),
        answers=tuple(f"{one.subject}: {one.headline}" for one in report.answers),
        command=str(report.run.provenance.get("command", "")),
        cases=len(report.rows),
        results=sum(row.step is not None for row in report.rows),
    )
    (folder / FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")


def listed(reports: Path) -> str:
    """Return the list as HTML: runs with facts, newest first, then folders with only a README."""
    found = {
        path.parent.name: msgspec.json.decode(path.read_bytes(), type=Entry)
        for path in reports.glob(f"*/{FACTS}")
    }
    entries = sorted(found.items(), key=lambda pair: (-pair[1].started_s, pair[0]))
    studies = [
        (path.parent.name, heading[1].replace("`", ""))
        for path in sorted(reports.glob("*/README.md"))
        if path.parent.name not in found
        and (heading := re.match(r"# (.+)", path.read_text(encoding="utf-8")))
    ]
    only_cpu = all({"CPU-ONLY", "EMULATED"} & {*one.labels} for one in found.values())
    style = templates.text_of("page.css")
    jinja = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return jinja.from_string(TEMPLATE).render(
        entries=entries,
        studies=studies,
        only_cpu=only_cpu,
        trials=TRIALS,
        style=Markup(style),
        allowed=Markup(templates.allowed(style)),
    )


def main() -> None:
    """Add a run if one is named, and write the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("name", nargs="?", help="the folder of the run in reports/")
    parser.add_argument("--title", default="")
    parser.add_argument("--about", default="", help="what was run, and what it shows")
    parser.add_argument("--store", type=Path, default=Path("dpbench.db"))
    parser.add_argument("--run")
    parser.add_argument("--reports", type=Path, default=REPORTS, help="the folder of the gallery")
    given = parser.parse_args()
    if given.name:
        if not given.about:
            parser.error("--about is missing: the list has a paragraph on each run")
        try:
            add(
                given.reports / given.name,
                given.title or given.name,
                given.about,
                given.store,
                given.run,
            )
        except ValueError as error:
            parser.error(str(error))
    given.reports.mkdir(parents=True, exist_ok=True)
    (given.reports / "index.html").write_text(listed(given.reports) + "\n", encoding="utf-8")
    print(given.reports / "index.html")


if __name__ == "__main__":
    main()
