"""The report: laws that hold for every page, on rows made by hand."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from html import unescape
from itertools import pairwise

import pytest

from dpbench.analysis import summary
from dpbench.analysis.statements import Statement
from dpbench.analysis.summary import Row
from dpbench.records import (
    Case,
    Sample,
    Source,
    Status,
    Step,
    Trial,
    Verified,
    words,
)
from dpbench.records.estimate import Estimate
from dpbench.report import figures, markdown, naming, page, small_multiples, svg, table
from tests.report_rows import (
    HOSTILE,
    PROVENANCE,
    STACK,
    Tags,
    answer,
    badges,
    colocated_cpu_and_weak,
    drawings,
    gpu_page,
    gpu_run,
    made,
    ran,
    run_of,
)
from tests.trials import of_run

OFFLINE = re.compile(
    r"https?://|@import|<link|(?<!Object)url\(|\bsrc\s*=|<iframe|<object|<base", re.IGNORECASE
)
"""What would reach out of the file; the JSON block and the text of users are searched apart."""


@pytest.mark.slow
def test_every_section_is_there_in_order_with_drawings() -> None:
    sections = figures.sections(gpu_run())
    order = ["lanes", "speedup", "steps", "utilisation"]
    assert [s.id for s in sections] == order
    assert all(len(section.panels) >= 2 for section in sections)
    found = re.findall(r'<section id="([^"]*)"', gpu_page())
    drawn = {section.id for section in sections}
    assert [name for name in found if name in drawn] == order
    assert found[:4] == ["answers", "lanes", "speedup", "cases"]
    assert found[-3:] == ["method", "environment", "reproduce"]
    folded = gpu_page().partition('<details id="details">')[2]
    assert re.findall(r'<section id="([^"]*)"', folded)[0] == "phases"
    for nav in re.findall(r"<nav.*?</nav>", gpu_page(), re.DOTALL):
        links = re.findall(r'href="#([^"]*)"', nav)
        assert [link for link in links if link != "details"] == found
        assert links[links.index("details") + 1] == "phases"
    assert re.findall(r'class="permalink" href="#([^"]*)"', gpu_page()) == found
    assert len(drawings(gpu_page())) == sum(len(section.panels) for section in sections)


@pytest.mark.slow
def test_labels_stand_beside_every_figure() -> None:
    cpu = run_of(*colocated_cpu_and_weak())
    for run, text in ((gpu_run(), gpu_page()), (cpu, page.render(cpu))):
        parts = dict(re.findall(r'<section id="([^"]*)"(.*?)</section>', text, re.DOTALL))
        for section in figures.sections(run):
            heading = badges(parts[section.id].partition("<figure")[0])
            found = re.findall(
                r"<figure.*?</svg>\s*<figcaption>(.*?)</figcaption>", parts[section.id], re.DOTALL
            )
            assert len(found) == len(section.panels)
            for caption, panel in zip(found, section.panels, strict=True):
                assert panel.labels
                assert {*heading, *badges(caption)} == {*panel.labels}
                assert not {*heading} & {*badges(caption)}, "each label stands once"
    mixed = page.render(run_of(*colocated_cpu_and_weak(), *gpu_run().rows[:2]))
    speedup = re.search(r'<section id="speedup".*?</section>', mixed, re.DOTALL)[0]
    assert badges(speedup.partition("<figure")[0]) == ["MEASURED"]
    captions = [badges(one) for one in re.findall("<figcaption>.*?</figcaption>", speedup)]
    assert ["CPU-ONLY", "COLOCATED"] in captions


def test_a_label_that_only_some_cases_carry_is_in_their_names() -> None:
    found, _ = small_multiples.split(colocated_cpu_and_weak(), per=99)
    (facet,) = found
    assert [name for name in facet.names if "COLOCATED" in name] == ["[COLOCATED] dp ×2, batch 64"]
    assert len(set(facet.names)) == len(facet.names)


def test_same_numbers_give_the_same_bytes_in_another_process() -> None:
    code = (
        "import sys, hashlib\nfrom dpbench.report import markdown\nassert not {'matplotlib',"
        " 'torch', 'jinja2'} & set(sys.modules), 'markdown needs no drawing'\nfrom tests import"
        " report_rows as t\nprint(hashlib.sha256(t.gpu_page().encode()).hexdigest())"
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **paths},
        check=True,
        capture_output=True,
        text=True,
    )
    assert other.stdout.strip() == hashlib.sha256(gpu_page().encode()).hexdigest()


def test_page_is_offline_and_small() -> None:
    # nothing its users wrote there has an address in it; a click opens Perfetto
    text = gpu_page().replace('const PERFETTO = "https://ui.perfetto.dev"', "")
    assert not OFFLINE.findall(text)
    assert len(gpu_page().encode()) < 400 * 1024
    loaded = [
        value
        for _, a in Tags(gpu_page()).found
        for name, value in a.items()
        if name in ("href", "xlink:href")
    ]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in loaded)
    assert "default-src 'none'" in gpu_page()


def test_the_page_has_the_drawn_steps_as_a_trace() -> None:
    block = re.search(r'id="trace">(.*?)</script>', gpu_page(), re.DOTALL)[1]
    events = json.loads(block)
    lanes = gpu_run().lanes
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == sum(len(lane.bars) for one in lanes.values() for lane in one.lanes)
    assert {event["pid"] for event in bars} == {*range(1, len(lanes) + 1)}
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in bars:
        by_thread.setdefault((bar["pid"], bar["tid"]), []).append((bar["ts"], bar["dur"]))
    for intervals in by_thread.values():
        for (start, took), (following, _) in pairwise(sorted(intervals)):
            assert start + took <= following + 0.01, "bars of one thread do not overlap"


def test_the_policy_allows_only_the_style_sheet_and_the_script_of_the_page() -> None:
    text = gpu_page()
    policy = next(
        a["content"]
        for a in Tags(text).all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "unsafe" not in policy
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert not [tag for tag, attributes in Tags(text).found if "style" in attributes]


def test_a_style_in_the_text_of_a_user_stays_text() -> None:
    hostile = 'm style="}body{display:none" x'
    text = page.render(run_of(made(Case(model=hostile, strategy="dp", batch_size=8), 0.1, 0.1)))
    assert "display:none" not in re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    assert unescape(text).count(hostile) > 5


def test_ids_are_unique_and_every_reference_is_met() -> None:
    tags = Tags(gpu_page())
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for _, a in tags.found if a.get("href", "").startswith("#")} <= set(ids)
    for attributes in tags.all("svg"):
        assert attributes["role"] == "img"
        assert set(attributes["aria-labelledby"].split()) <= set(ids)


def test_what_users_wrote_stays_text() -> None:
    rows = [
        made(
            Case(model=HOSTILE, strategy='dp"onload=alert(1)', schedule="$\\frac{", batch_size=8),
            0.1,
            0.1,
        ),
        made(
            Case(
                model=HOSTILE,
                strategy="ddp",
                batch_size=8,
                options=(("a", "</desc><b>&\x00\ud800"),),
            ),
            0.1,
            0.1,
        ),
        Row(
            case=Case(model="m", strategy="s", batch_size=1),
            source=Source.MEASURED,
            status=Status.FAILED,
            reason=STACK,
        ),
    ]
    cases = ((rows[0].case, HOSTILE), (rows[2].case, ""))
    stated = [
        Statement(key=HOSTILE, text=HOSTILE, warns=warns, cases=cases) for warns in (True, False)
    ]
    said = dict.fromkeys(
        ("subject", "headline", "reason", "certainty", "memory", "earlier", "command"), HOSTILE
    )
    answers = [answer(rows[0], **said, labels=(HOSTILE,))]
    given = dataclasses.replace(run_of(*rows), notes=[HOSTILE], statements=stated, answers=answers)
    provenance = {"command": HOSTILE, "host": {"name": HOSTILE}, HOSTILE: HOSTILE}
    given = of_run(given, id=HOSTILE, provenance=provenance)
    text = page.render(given)
    tags = Tags(text)
    assert [a.get("type") for a in tags.all("script")] == ["application/json"] * 3 + [None]
    assert not [name for _, a in tags.found for name in a if name.startswith("on")]
    assert HOSTILE not in text
    assert text.count("alert(1)") > 20
    # the end of a script element inside the JSON block would end the block
    block = re.search(
        r'<script type="application/json" id="numbers">(.*?)</script>', text, re.DOTALL
    )[1]
    stored = json.loads(block)
    reasons, models = (
        [row[stored["columns"].index(name)] for row in stored["rows"]]
        for name in ("reason", "model")
    )
    assert STACK in reasons
    assert {*models} == {HOSTILE, "m"}
    text.encode()


def test_every_case_is_in_the_table_and_failures_keep_their_reason() -> None:
    rows = gpu_run().rows
    assert gpu_page().count('<tbody class="case"') == len(rows) == 20
    assert len(json.loads(re.search(r'id="numbers">(.*?)</script>', gpu_page())[1])["rows"]) == len(
        rows
    )
    pre = re.search(r"<pre>(.*?)</pre>", gpu_page(), re.DOTALL)[1]
    assert unescape(pre) == STACK
    assert "needs &#34;spread&#34;" in gpu_page()


def test_a_failure_in_one_round_is_told_beside_the_result_of_the_others() -> None:
    row = made(Case(model="mlp", strategy="dp", batch_size=8), 0.1)
    trials = [
        *ran(row),
        *(Trial(case=row.case, status=Status.TIMEOUT, reason="60 s", round=n) for n in (3, 5)),
    ]
    (line,) = table.all_cases(run_of(row, trials=trials)).lines
    assert line.status == "ok"
    assert line.notes == (("timeout in rounds 4, 6", "60 s"),)


def test_an_unverified_case_is_never_shown_as_a_result() -> None:
    case = Case(model="mlp", strategy="dp", batch_size=8)
    trials = [
        dataclasses.replace(trial, verified=Verified.NO, reason="differs")
        for trial in ran(made(case, 0.1))
    ]
    (row,) = summary.rows(trials)
    (line,) = table.all_cases(run_of(row, trials=trials)).lines
    assert line.status == "unverified"
    assert line.notes[0][1] == "differs"
    text = page.render(run_of(row, trials=[dataclasses.replace(t, samples=()) for t in trials]))
    assert not drawings(text)


BARE = made(
    Case(model="mlp", strategy="dp", batch_size=8),
    0.1,
    busy={},
    phases={},
    host_bytes=0,
)
ODD = {
    "nothing": run_of(),
    "only failures": run_of(*gpu_run().rows[-2:]),
    "one row": run_of(made(Case(model="mlp", strategy="single", batch_size=8), 0.1)),
    "bare row": run_of(BARE, trials=[]),
    "no provenance": of_run(run_of(BARE, trials=[]), provenance={}),
    "predicted": run_of(
        *(
            dataclasses.replace(
                row, source=Source.PREDICTED, labels=("PREDICTED",), rounds=1, steps=1
            )
            for row in gpu_run().rows[:9]
        )
    ),
    "infinite": run_of(
        made(
            Case(model="mlp", strategy="dp", batch_size=8, devices=2),
            0.1,
            0.1,
            speedup=Estimate(1, 0, float("inf"), 1),
            imbalance=Estimate(float("inf"), 1, float("nan"), 1),
        )
    ),
    "idle": run_of(
        made(
            Case(model="mlp", strategy="dp", batch_size=8, devices=2),
            0.1,
            0.1,
            busy={0: 0.0, 1: 0.0},
            memory={0: 0, 1: 0},
            imbalance=None,
        )
    ),
    "unicode": run_of(
        made(Case(model="модель_模型_🚀" * 9, strategy="dp", batch_size=8, devices=2), 0.1, 0.1)
    ),
    "one sample": run_of(
        BARE,
        trials=[
            Trial(
                case=BARE.case,
                steps=(Step(0.1, False, 1.0),),
                samples=(Sample(1.0, -1, "core0_utilization_ratio", 1.7),),
            )
        ],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_make_a_page_and_a_comment(name: str) -> None:
    run = ODD[name]
    text = page.render(run)
    sections = re.findall('<section id="([^"]*)"', text)
    assert sections[0] == "answers"
    assert {"lanes", "speedup", "cases", "steps", "utilisation"} <= {*sections}
    assert ("reproduce" in sections) == bool(run.run.provenance)
    assert text.count('<tbody class="case"') == len(run.rows)
    assert "nan" not in "".join(re.findall(r'(?: d| x| y|points)="[^"]*"', text)).lower()
    assert markdown.render(run)
    for section in figures.sections(run):
        assert section.panels or section.note


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read_in_every_theme() -> None:
    themes = [
        dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", gpu_page(), re.DOTALL)
    ]
    assert len(themes) == 3
    used = set(re.findall(r"var\((--[\w-]+)\)", gpu_page()))
    for theme in themes:
        assert used <= set(theme)
        for ground in (theme["--bg"], theme["--card"]):
            assert (
                min(contrast(theme[text], ground) for text in ("--fg", "--muted", "--warn")) >= 4.5
            )
            assert (
                min(
                    contrast(theme[name], ground)
                    for name in theme
                    if name not in ("--bg", "--card", "--grid")
                )
                >= 3
            )
            for look in svg.PHASES.values():
                assert contrast(look.fill, ground) >= 3
    for look in svg.PHASES.values():
        assert contrast(look.fill, look.ink) >= 4.5


def test_markdown_has_the_notes_the_table_and_no_markup_of_users() -> None:
    text = markdown.render(gpu_run())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 20 + 2 + 18 + 2 + 16
    assert len({line.replace(r"\|", "").count("|") for line in rows[:22]}) == 1
    assert gpu_run().notes[0].partition(" [")[0] in text
    assert HOSTILE not in text
    assert "MEASURED" in text
    assert "skipped: needs" in text
    for one in gpu_run().answers:
        (line,) = (
            line
            for line in text.splitlines()
            if line.startswith(f"**{one.subject}: {one.headline}.**")
        )
        assert line.endswith("\\")
        assert f"\nNext: `{one.command}`\n" in text
        assert f"**{one.subject}**: " in text
        assert "Device 0 holds 6.00 GiB." in text
    strange = answer(gpu_run().rows[1], command="a `` b")
    assert "Next: ```a `` b```\n" in markdown.render(
        dataclasses.replace(gpu_run(), answers=[strange])
    )
    hostile = Row(
        case=Case(model="a|b`c", strategy="@me", batch_size=1),
        source=Source.MEASURED,
        status=Status.FAILED,
        reason="![x](https://e.org/i.png)",
    )
    text = markdown.render(run_of(hostile))
    assert "![x](" not in text
    assert "https://" not in text
    assert " @me" not in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.674444, "0.674"),
        (0.99996, "1.00"),
        (54.9, "54.9"),
        (94892.9, "94,893"),
        (0.0123456, "0.0123"),
        (0, "0"),
        (float("inf"), "–"),
    ],
)
def test_numbers_have_three_digits(value: float, said: str) -> None:
    assert words.number(value) == said


def test_sizes_are_binary_and_lines_are_cut_with_wide_letters_counted_twice() -> None:
    assert words.size(6 * 2**30) == "6.00 GiB"
    assert words.size(0) == "0 B"
    assert words.size(2**50 * 5.0) == "5,120 TiB"
    assert naming.clip("模型模型", 5) == "模…"
    assert naming.clip("a\n b\x00", 5) == "a b"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"foreign_load": {"foreign": 0.01}, "noisy": {}}, "1.0% of the cores before the run"),
        (
            {"foreign_load": {"foreign": 0.3, "steal": 0.1}, "noisy": {}},
            "40% of the cores before the run",
        ),
        ({"foreign_load": {"foreign": 0.9}, "noisy": {"load": "90%"}}, "NOISY"),
        ({"foreign_load": {"unknown": "no /proc/stat"}, "noisy": {}}, None),
    ],
)
def test_the_head_of_the_page_says_whether_other_processes_used_the_cores(
    facts: dict, said: str | None
) -> None:
    report = of_run(gpu_run(), provenance={**PROVENANCE, **facts})
    assert dict(naming.facts(report)).get("other load") == said


def test_the_table_of_all_cases_says_which_intervals_it_has() -> None:
    measured = gpu_run().rows[0]
    predicted = dataclasses.replace(measured, source=Source.PREDICTED)
    for rows, intervals in (
        ([measured], "95% intervals."),
        ([predicted], "80% intervals."),
        ([measured, predicted], "95% intervals, and 80% intervals of predictions."),
    ):
        assert table.lead(rows).startswith(f"In small type: {intervals} ")
