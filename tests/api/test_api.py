"""The Python interface: measure, read a store or an export, and look at the results."""

from __future__ import annotations

import gzip
import inspect
import os
import random
import re
import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

import dpbench as dp
from dpbench.analysis.findings import text
from dpbench.analysis.findings.rule import overlap
from dpbench.cli import running
from dpbench.measure import launch
from dpbench.records import Case, Phase, Status, Step, Trial, Verified
from dpbench.records.options import Options
from dpbench.report import figures, notebook, svg
from dpbench.store import Identity, Naming, Store, StoredRun, StoreError, export
from tests import commands, standing_in
from tests.exported import DP, PROVENANCE, made, stored
from tests.marked import patience

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
HOSTILE = "<script>alert(1)</script>"


def measured(case: Case, step_s: float, number: int) -> Trial:
    """Return a trial of a round with steps of about this duration."""
    trial = made(case, number=number, at_s=5000.0 + number)
    factor = step_s / 0.002 * random.Random(f"{case.label} {number}").uniform(0.99, 1.01)
    steps = tuple(replace(step, seconds=step.seconds * factor) for step in trial.steps)
    return replace(trial, steps=steps)


def trials(*extra: Trial) -> list[Trial]:
    return [
        *(measured(case, s, n) for n in range(5) for case, s in ((SINGLE, 0.004), (DP, 0.0025))),
        *extra,
    ]


FAILED = Trial(
    case=replace(DP, model=HOSTILE), status=Status.OOM, reason=f"out of memory {HOSTILE}"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one run, which has two cases with results and one that failed."""
    path = tmp_path_factory.mktemp("api") / "dpbench.db"
    stored(path, *trials(FAILED), provenance={**PROVENANCE, "command": f"dpbench run {HOSTILE}"})
    return path


@pytest.fixture(scope="module")
def run(file: Path) -> dp.Run:
    return dp.load(file)


# -- the interface


COMMAND_ONLY = {"report", "find_max_batch", "as_json", "dry_run"}
"""The options of `dpbench run` with other results than a run."""


def test_the_arguments_are_the_options_of_the_command_with_their_defaults() -> None:
    offered = inspect.signature(dp.run).parameters
    assert {*offered} == {one.name for one in running.run.params} - COMMAND_ONLY
    defaults = {
        name: one.default
        for name, one in offered.items()
        if name not in {"store", "quiet", "verbose"}
    }
    assert defaults == {
        one.name: one.default for one in fields(Options) if one.name != "find_max_batch"
    }
    [store] = [one for one in running.run.params if one.name == "store"]
    assert offered["store"].default == store.default


def test_the_interface_is_listed_and_documented() -> None:
    assert dir(dp) == sorted(dp.__all__)
    assert {"run", "load", "open_trials", "Run", "DataParallel"} <= {*dir(dp)}
    public = [getattr(dp.Run, name) for name in vars(dp.Run) if not name.startswith("_")]
    assert [
        one for one in (dp, dp.run, dp.load, dp.open_trials, dp.Run, *public) if not one.__doc__
    ] == []
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = dp.rnu


# -- a run


def test_a_run_has_the_facts_and_results_of_the_command_line(
    run: dp.Run, file: Path, tmp_path: Path
) -> None:
    assert repr(run).startswith(f"<dpbench.Run {run.id[:8]}: 3 cases, {run.status};")
    assert repr(run).endswith(" MEASURED CPU-ONLY>")
    assert (run.status, run.provenance["host"]["cpu"]) == ("finished", "EPYC")
    assert run.started is not None
    answer = next(one for one in run.answers if one.subject == "mlp")
    assert "1.6" in answer.headline
    assert answer.text in run.verdict
    assert "[MEASURED] [CPU-ONLY]" in run.verdict
    said = text.explain(
        run.answers,
        run.analysis.diagnoses,
        run.analysis.rows,
        statements=run.analysis.statements,
    )
    assert run.explain() == said
    assert run.explain().startswith(run.answers[0].subject)
    everything = " ".join(run.explain(all=True, samples=1000).split())
    assert answer.epoch(1000) in everything
    assert f"{run.analysis.diagnoses[0].row.label} [MEASURED CPU-ONLY]" in everything
    assert any("oom" in warning for warning in run.warnings), run.warnings
    page = run.report(tmp_path / "new" / "page.html")
    assert page.read_text().startswith("<!doctype html>")
    assert sum(len(trial.spans) for trial in run.trials) > 100
    assert [trial.case for trial in run.trials] == [trial.case for trial in trials(FAILED)]


def test_answers_print_as_the_command_prints_them(
    run: dp.Run, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dpbench.cli import showing

    showing.print_answers(run.analysis.answers)
    assert f"\n{run.answers}\n" == capsys.readouterr().out
    assert repr(run.answers) == str(run.answers)
    for answer in run.answers:
        assert [one.strip() for one in repr(answer).splitlines()] == [
            f"{answer.lines[0]} [{' '.join(answer.labels)}]",
            *answer.lines[1:],
        ]
    assert len(repr(run.answers)) < 2000


def test_the_tables_are_tidy_and_agree_with_each_other(run: dp.Run) -> None:
    cases, steps, phases, samples = run.frame, run.steps, run.phases, run.samples
    assert list(cases["strategy"]) == ["dp", "single", "dp"]
    assert (len(steps), set(steps["run_id"])) == (60, {run.id})
    keys = ["model", "strategy", "devices", "round", "step"]
    whole = steps.set_index(keys)["seconds"]
    pd.testing.assert_series_equal(
        phases.groupby(keys)["seconds"].sum(), whole.sort_index(), check_exact=False
    )
    timed = (
        steps[~steps["warmup"]]
        .groupby(["strategy", "round"])["seconds"]
        .median()
        .groupby("strategy")
        .median()
    )
    medians = cases[cases["status"] == "ok"].set_index("strategy")["step_value"]
    assert medians.to_dict() == pytest.approx(timed.to_dict())
    power = samples[samples["metric"] == "power_w"]
    assert sorted(set(zip(power["device"], power["value"], strict=True))) == [
        (-1, 99.5),
        (0, 100.5),
        (1, 101.5),
    ]
    for table in (cases, steps, phases, samples):
        assert {"run_id", "model", "strategy", "batch_size", "labels", "status"} <= {*table}
    steps["seconds"] = 0.0
    assert (run.steps["seconds"] > 0).all(), "a table is the caller's"


def test_trials_that_give_no_result_say_so_in_the_tables(tmp_path: Path) -> None:
    wrong = made(SINGLE, verified=Verified.NO)
    stored(tmp_path / "x.db", wrong)
    assert set(dp.load(tmp_path / "x.db").steps["status"]) == {"unverified"}
    stored(tmp_path / "empty.db")
    empty = dp.load(tmp_path / "empty.db")
    assert (len(empty.steps), len(empty.phases), len(empty.samples), len(empty.frame)) == (
        0,
        0,
        0,
        0,
    )
    assert list(empty.steps) == list(dp.load(tmp_path / "x.db").steps)
    assert "0 cases" in repr(empty)
    assert empty.verdict == repr(empty.answers) == "Nothing was measured."


class Tags(HTMLParser):
    """Collects the tags of a page and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.said: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        assert not {"src", "onclick"} & found.keys()
        assert (found.get("href") or "#").startswith("#"), "a drawing refers to its own parts"
        self.ids += filter(None, [found.get("id")])

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_the_html_of_a_run_is_small_escaped_and_needs_no_network(run: dp.Run) -> None:
    html = run._repr_html_()
    found = Tags(html)
    assert "script" not in found.tags
    assert "link" not in found.tags
    assert found.tags.count("tr") == 1 + 3 + 1, "a line a case, and one for the reason of a failure"
    text = " ".join(found.said)
    for answer in run.answers:
        assert answer.headline in text
        assert answer.ranked[1:] in text
    assert f"out of memory {HOSTILE}" in text
    assert found.tags.count("svg") == 1, "the swim lanes"
    assert len(html) < 40_000
    assert html == run._repr_html_()


def test_a_plot_has_the_swim_lanes_and_the_speed_ups(run: dp.Run) -> None:
    found = Tags(run.plot()._repr_html_())
    assert found.tags.count("svg") == 2
    with svg.theme():
        titles = {one.id: one.title for one in figures.sections(run.analysis)}
    assert {titles["lanes"], titles["speedup"]} <= {*found.said}
    assert len(found.ids) == len({*found.ids})
    other = dp.Run(StoredRun("f" * 32, "finished", 0.0, 5, {}), run.trials, None)
    both = found.ids + Tags(other.plot()._repr_html_()).ids
    assert len(both) == len({*both}), "a notebook shows several runs"


def test_a_plot_is_a_figure_with_the_drawings_of_the_page(run: dp.Run, tmp_path: Path) -> None:
    figure = run.plot()
    assert isinstance(figure, Figure)
    assert [axes.get_xlabel().split()[0] for axes in figure.axes] == ["milliseconds", "speed-up"]
    for name in ("plot.png", "plot.pdf", "plot.svg"):
        figure.savefig(tmp_path / name, bbox_inches="tight")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plot.pdf").read_bytes().startswith(b"%PDF")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert [one for one in svg.VARIABLES if one in drawn] == [], "colours that no theme has"
    written = {text for _, text in re.findall(r"<text( [^>]*)?>([^<]+)</text>", drawn)}
    shown = re.findall(r"<text[^>]*>([^<]+)</text>", figure._repr_html_())
    assert {*shown} <= written, "the texts of the page's drawings"
    assert sum("[MEASURED CPU-ONLY]" in text for text in written) == 2
    figure.clear()
    assert figure.axes == []


def test_a_plot_without_a_drawing_says_why(tmp_path: Path) -> None:
    stored(tmp_path / "none.db", replace(made(SINGLE, verified=Verified.NO), spans=()))
    figure = dp.load(tmp_path / "none.db").plot()
    assert figure.axes == []
    assert "No case has spans" in figure.texts[0].get_text()


def test_a_notebook_has_the_colours_of_the_drawings_in_both_themes() -> None:
    for theme in (notebook.LIGHT, notebook.DARK):
        assert {f"{name}:" for name in svg.VARIABLES.values()} <= {*theme.split()}
    assert notebook.LIGHT != notebook.DARK
    assert ":root" not in notebook.STYLE


# -- without matplotlib


HIDDEN = """
import sys
sys.modules["matplotlib"] = None
import dpbench as dp
from dpbench import cli
run = dp.load("dpbench.db")
assert run.answers and len(run.frame) == 3
assert "No swim lanes: " in run._repr_html_() and "<svg" not in run._repr_html_()
for draw in (run.plot, lambda: run.report("page.html"), lambda: run.compare(run).page("page.html")):
    try:
        draw()
    except LookupError as error:
        assert "pip install matplotlib" in str(error)
    else:
        raise AssertionError(draw)
for command, expected in (
    ("report --md", 0), ("report --json", 0), ("report", 64), ("explain --all", 0),
    ("compare @last @last --md", 3), ("compare @last @last --report page.html", 64),
    ("export csv", 0), ("show @last", 0),
):
    try:
        cli.main(command.split())
        code = 0
    except SystemExit as end:
        code = end.code or 0
    assert code == expected, (command, code)
assert [name for name in sys.modules if name.startswith("matplotlib")] == ["matplotlib"]
"""


@pytest.mark.slow
def test_only_drawings_and_pages_need_matplotlib(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(commands.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, done.stderr
    assert all("pip install matplotlib" in line for line in errors)
    assert not (file.parent / "page.html").exists()


# -- where runs come from


def test_a_run_is_found_by_the_beginning_of_its_id_and_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    first = stored(path, made())
    with Store.create(path, Naming(name="nightly")) as store:
        second, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
    assert dp.load(path, first[:10]).id == first
    assert {dp.load(path).id, dp.load(path, "@last").id, dp.load(path, "@nightly").id} == {second}
    with pytest.raises(
        ValueError, match=f"no run whose id begins with 'zzz'; its runs are: .*{first[:8]}"
    ):
        dp.load(path, "zzz")
    with pytest.raises(StoreError, match="dpbench run"):
        dp.load(tmp_path / "none.db")
    (tmp_path / "x.txt").write_text("no store " * 99)
    with pytest.raises(StoreError, match=r"give another file with store=$"):
        dp.load(tmp_path / "x.txt")


def test_an_exported_run_gives_the_same_results_and_does_not_invent_what_is_missing(
    run: dp.Run, tmp_path: Path
) -> None:
    path = tmp_path / "trials.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(export.jsonl(run.id, run.trials))
    found = dp.open_trials(path)
    assert (found.id, found.status, found.started, found.provenance) == (
        run.id,
        "exported",
        None,
        {},
    )
    pd.testing.assert_frame_equal(found.phases, run.phases)
    pd.testing.assert_frame_equal(found.steps, run.steps)
    assert len(found.samples) == 0
    same = [
        name
        for name in run.frame
        if name.startswith(("step_", "speedup_", "phase_", "memory_", "status"))
    ]
    assert len(same) > 20
    pd.testing.assert_frame_equal(found.frame[same], run.frame[same])
    assert [one.headline for one in found.answers] == [one.headline for one in run.answers]
    assert overlap([one for one in run.trials if one.case == DP], Phase.FORWARD) == pytest.approx(
        56 / 30
    )
    assert overlap(found.trials, Phase.FORWARD) is None, "unknown, and not 0"
    assert "1970" not in found._repr_html_() + found.report(tmp_path / "page.html").read_text()
    plain = tmp_path / "plain.jsonl"
    plain.write_text(
        "".join(export.jsonl("other", run.trials)) + "".join(export.jsonl(run.id, run.trials))
    )
    assert dp.open_trials(plain, run.id[:6]).id == run.id
    with pytest.raises(
        ValueError,
        match=f"2 runs whose id begins with ''; give the beginning of an id: other, {run.id[:12]}",
    ):
        dp.open_trials(plain)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"no json\n", "line 1: this is not an export"),
        ("a.jsonl", b'{"run_id": "a"}\n', "line 1: .*missing required field `case`"),
        ("a.jsonl", b"", "0 runs"),
        ("a.jsonl.gz", b"not gzip", "this is not an export"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:9], "this is not an export"),
    ],
)
def test_a_file_that_is_no_export_is_refused_with_its_line(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        dp.open_trials(tmp_path / name)


# -- measuring


@pytest.mark.usefixtures("quick")
def test_a_run_is_measured_stored_and_resumed_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left = [2]

    def interrupted(case: Case, effort: object) -> dict[str, object]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return {"steps": tuple(Step(0.01, False, float(n + 1)) for n in range(3))}

    monkeypatch.setattr(standing_in.Server, "act", staticmethod(interrupted))

    def measure() -> dp.Run:
        return dp.run(
            models="mlp",
            strategies=["single", "dp"],
            devices=2,
            rounds=2,
            name="mine",
            tag="a=b",
            quiet=True,
        )

    with pytest.raises(
        KeyboardInterrupt,
        match=r"stored in dpbench.db; to resume the run, call dpbench.run with the",
    ):
        measure()
    assert (dp.load().status, len(dp.load().trials)) == ("interrupted", 2)
    left[0] = 99
    found = measure()
    assert (found.status, len(found.trials), left[0]) == ("finished", 4, 97)
    assert found.id == dp.load(run="@mine").id
    command = (
        "dpbench --no-config run --models mlp --strategies single,dp --devices 2 --rounds 2 --name"
        " mine --tag a=b"
    )
    assert found.provenance["command"] == command, "Python reads no defaults from files"
    assert capfd.readouterr() == ("", "")
    dp.run(models="mlp", strategies="single", rounds=1, store=Path("other file.db"))
    said = capfd.readouterr()
    assert said.out == ""
    assert "1 trial measured" in said.err
    repeated = (
        "dpbench --no-config run --models mlp --strategies single --rounds 1 --store 'other"
        " file.db'"
    )
    assert dp.load("other file.db").provenance["command"] == repeated


@pytest.mark.usefixtures("quick")
def test_wrong_arguments_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # each error names arguments, as the caller wrote them
    for wrong, kind, said in (
        ({"quiet": True, "verbose": True}, ValueError, "quiet=True and verbose=True"),
        ({"rnds": 2}, TypeError, "did you mean 'rounds'"),
        ({"models": "resnet81"}, LookupError, "give models='file.py:name'"),
        ({"model": object()}, ValueError, "this object lacks build, batch, loss"),
        ({"model": "absent:net"}, LookupError, "models='absent:net': "),
        ({"model": "absent"}, LookupError, "unknown model 'absent'"),
        ({"models": "no.py:net"}, LookupError, "models='no.py:net': there is no file no.py"),
        ({"batch_sizes": 0}, ValueError, "batch_sizes= must be"),
        ({"ladder": True, "devices": 1}, ValueError, "ladder=True needs .* give devices=2"),
        ({"device_kind": "cpu", "device_ids": 0}, ValueError, "leave out device_ids="),
        ({"tag": "a"}, ValueError, "tag= must be key=value"),
        ({"find_max_batch": True}, ValueError, "`dpbench run --find-max-batch`"),
    ):
        with pytest.raises(kind, match=said):
            dp.run(**wrong)
    monkeypatch.setattr(launch, "of_environment", object)
    with pytest.raises(
        RuntimeError, match="under torchrun or srun, use the command `dpbench run` instead"
    ):
        dp.run(models="mlp")
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


SCRIPT = """
import sys
import dpbench as dp
assert not {"torch", "pandas", "numpy", "click", "matplotlib"} & sys.modules.keys()
print("main")
run: dp.Run = dp.run(
    models=["mlp"], strategies="single", batch_sizes=8, devices=[1],
    rounds=1, budget=30, patience=0, quiet=True
)
seconds: float = run.steps["seconds"].sum()
headlines: list[str] = [answer.headline for answer in run.answers]
assert run.status == "finished" and seconds > 0 and headlines, run.verdict
assert run.trials[0].verified == "bitwise"
assert "torch" not in sys.modules, "the measuring processes load torch, and this process does not"
print(repr(run), dp.load().id == run.id, run.started and run.started.year)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_measures_and_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(commands.ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == "main"
    assert second.startswith("<dpbench.Run ")


WRONG = """
import dpbench as dp
run = dp.run(store=3)
verdict: int = run.verdict
frame: str = run.frame
"""
MYPY = """
[mypy]
strict = true
follow_imports = silent
cache_dir = /dev/null
[mypy-torch.*,matplotlib.*,numpy.*,rich.*,scipy.*,IPython.*,click.*,jinja2.*,psutil.*,msgspec.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_interface(tmp_path: Path) -> None:
    """The slow analysis of libraries without a type in the interface is left out."""
    for name, code in (("right", SCRIPT), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "mypy.ini").write_text(MYPY)
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(tmp_path / "mypy.ini"),
        str(tmp_path / "right.py"),
    ]
    done = subprocess.run(
        [*mypy, str(tmp_path / "wrong.py")],
        cwd=commands.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if "wrong.py" not in line] == []
    found = [line.partition("error: ")[2] for line in errors]
    assert 'incompatible type "int"; expected "str | Path"' in found[0], done.stdout
    assert 'expression has type "str", variable has type "int"' in found[1]
    assert 'expression has type "DataFrame", variable has type "str"' in found[2]
    assert len(found) == 3
