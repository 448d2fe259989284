"""Two runs compared: their choice, permitted comparisons, verdicts with reasons, and forms."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dpbench as dp
from dpbench.analysis import comparison, stats
from dpbench.analysis.report import Report
from dpbench.cli import comparing
from dpbench.hardware import provenance
from dpbench.records import Case, Phase, Source, Span, Status, Step, Trial, Verified
from dpbench.records.environment import HIDDEN
from dpbench.records.estimate import Doubt, Estimate
from dpbench.report import comparing as drawing
from dpbench.report import svg, swim_lanes
from dpbench.store import Identity, Naming, PastRun, Store, StoredRun, export
from tests import environments
from tests.amounts import amounts
from tests.exported import is_error
from tests.trials import report_on

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
DP = Case(model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference")
HOSTILE = "<script>alert(1)</script>"


def trial(
    case: Case, forward_s: float, backward_s: float, number: int = 0, noise: float = 0.001
) -> Trial:
    """Return a trial of ten steps, each a forward and a backward."""
    draw = random.Random(f"{case.label} {number} {forward_s}")
    steps, spans, end_s = [], [], 100.0
    level = 1 + noise * draw.uniform(-1, 1)
    for index in range(10):
        start_s, half_s = end_s, end_s + forward_s * level
        end_s = half_s + backward_s * level
        steps.append(Step(end_s - start_s, index < 2, end_s))
        spans += [
            Span(index, Phase.FORWARD, 0, "host", start_s, half_s),
            Span(index, Phase.BACKWARD, 0, "host", half_s, end_s),
        ]
    return Trial(
        case=case,
        round=number,
        verified=Verified.BITWISE,
        steps=tuple(steps),
        spans=tuple(spans),
        provenance={"torch": "2.13.0+cpu"},
    )


def rounds(*cases: tuple[Case, float, float], noise: float = 0.001) -> list[Trial]:
    return [trial(*one, number=number, noise=noise) for one in cases for number in range(5)]


BEFORE = rounds((SINGLE, 0.002, 0.004), (DP, 0.002, 0.003))
AFTER = rounds((SINGLE, 0.002, 0.004), (DP, 0.002, 0.001))
FACTS = {
    "host": {"name": "bench-07", "cpu": "EPYC", "cores": 2},
    "dpbench": {"version": "0.1.0", "commit": "aaaa1111", "dirty": True},
    "project": {"commit": "bbbb2222"},
    "packages": {"torch": "2.13.0"},
}


def stored(
    path: Path, trials: Sequence[Trial], facts: dict[str, Any] = FACTS, name: str = ""
) -> str:
    with Store.create(path, Naming(name=name)) as store:
        run_id, _ = store.begin_run(
            Identity(str(random.random()), "h", "c"), rounds=5, provenance=facts
        )
        for one in trials:
            store.end_trial(store.begin_trial(run_id, one.case, one.round), one)
        store.end_run(run_id)
    return run_id


def report(trials: Sequence[Trial], facts: dict[str, Any] = FACTS) -> Report:
    return report_on([one.summary() for one in trials], facts)


# -- verdicts and their reasons


def test_each_case_has_both_times_the_ratio_and_the_phase_that_changed_most() -> None:
    found = comparison.between(report(BEFORE), report(AFTER))
    lines = {line.case: line for line in found.lines}
    same, faster = lines[SINGLE], lines[DP]
    assert (same.verdict, faster.verdict) == ("same", "faster")
    assert [line.case for line in found.lines] == [DP, SINGLE], "what changed comes first"
    assert amounts(same.reason) == ["1.0%", "1"]
    assert (faster.before.value, faster.after.value) == (
        pytest.approx(0.005, rel=0.01),
        pytest.approx(0.003, rel=0.01),
    )
    assert faster.ratio.value == pytest.approx(5 / 3, rel=0.01)
    assert (faster.phase, faster.phase_s) == ("backward", pytest.approx(-0.002, rel=0.01))
    assert faster.share == pytest.approx(1.0, abs=0.01)
    assert faster.labels == ("MEASURED", "CPU-ONLY")
    assert found.verdicts == {"same": 1, "faster": 1}
    back = comparison.between(report(AFTER), report(BEFORE))
    assert {line.case: line.verdict for line in back.lines} == {SINGLE: "same", DP: "slower"}


def test_the_share_of_a_phase_is_that_of_all_changes() -> None:
    first, second = [trial(DP, 0.002, 0.004)], [trial(DP, 0.003, 0.001)]
    [line] = comparison.compare(first, second)
    assert (line.phase, line.share) == ("backward", pytest.approx(0.75, abs=0.01))


def of(value: float, half: float, n: int = 5) -> Estimate:
    return Estimate(value, value * (1 - half), value * (1 + half), n)


@pytest.mark.parametrize(
    ("others", "ratio", "verdict", "doubt", "numbers"),
    [
        (0, of(1.5, 0.01), "faster", None, ["1", "99%"]),
        (4, of(0.5, 0.01), "slower", None, ["1", "99%", "5"]),
        (0, of(1.002, 0.0015), "same", None, ["1.0%", "1", "1"]),  # although it excludes 1
        (0, of(1.1, 0.2), "undecided", None, ["1", "1.0%", "ROUNDS", "80%"]),
        (0, of(1.0, 0.5), "undecided", None, ["1", "1.0%"]),  # too many rounds would be needed
        (0, of(1.5, 0.01, 2), "undecided", Doubt.ROUNDS, ["2", "3"]),
        (0, Estimate(1.0, 0.3, 3.0, 5), "undecided", Doubt.WIDTH, ["4"]),
        (0, replace(of(1.5, 0.01), noisy=True), "undecided", Doubt.NOISY, ["3"]),
    ],
)
def test_a_verdict_has_its_reason(
    others: int,
    ratio: Estimate,
    verdict: str,
    doubt: Doubt | None,
    numbers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ratios = iter([ratio, *[of(1.0, 0.3)] * others])
    monkeypatch.setattr(stats, "ratio", lambda *sides, paired, level: next(ratios))
    cases = [replace(DP, batch_size=size) for size in range(8, 9 + others)]
    lines = comparison.compare(
        [trial(case, 1, 1) for case in cases], [trial(case, 1, 1) for case in cases]
    )
    line = next(line for line in lines if line.case == cases[0])
    assert (line.verdict, line.ratio.doubt) == (verdict, doubt)
    rounds = str(stats.rounds_to_decide(ratio, margin=stats.MARGIN, most=comparison.NEVER))
    assert amounts(line.reason) == [rounds if one == "ROUNDS" else one for one in numbers]


def test_the_interval_that_is_printed_decides_and_holds_for_all_cases_together() -> None:
    lines = comparison.compare(BEFORE, AFTER)
    assert {line.ratio.level for line in lines} == {stats.joint_level(2, comparison.SURE)}
    (alone,) = comparison.compare(BEFORE[5:], AFTER[5:])
    (beside,) = [line for line in lines if line.case == alone.case]
    assert beside.ratio.low < alone.ratio.low < alone.ratio.high < beside.ratio.high


# -- what may be compared


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host": {"cpu": "Xeon", "cores": 2}}, "processor: EPYC, then Xeon"),
        ({"host": {"cpu": "EPYC", "cores": 4}}, "cores: 2, then 4"),
        (
            {"gpus": {"gpus": [{"name": "A100"}] * 2}},
            "GPUs: none, then A100; number of GPUs: 0, then 2",
        ),
    ],
)
def test_unlike_machines_are_refused_and_labelled_if_asked_for(
    changed: dict[str, Any], said: str
) -> None:
    before, after = report(BEFORE, FACTS | {"gpus": {"gpus": []}}), report(AFTER, FACTS | changed)
    with pytest.raises(ValueError, match=rf"runs differ \({said}\); give unlike=True"):
        comparison.between(before, after)
    found = comparison.between(before, after, unlike=True)
    assert "; ".join(map(str, found.unlike)) == said
    assert all("UNLIKE" in line.labels for line in found.lines)


def differing(name: str) -> tuple[Report, Report]:
    """Return two reports whose environments differ in one fact."""
    change = environments.OF_TRIALS.get(name, lambda trial: trial)
    now = environments.facts(name) if name in environments.CHANGED else environments.FACTS
    bare = [replace(one, provenance={}) for one in BEFORE]
    return report(bare, environments.FACTS), report([*map(change, bare)], now)


@pytest.mark.parametrize("name", [*environments.CHANGED, *environments.OF_TRIALS])
def test_a_difference_that_is_asked_for_is_compared_and_labelled_and_any_other_refused(
    name: str,
) -> None:
    before, after = differing(name)
    asked = environments.ASKED[name]
    if name == "fakes":  # asked for as devices, they stay uncomparable
        with pytest.raises(ValueError, match="fake GPUs mean nothing"):
            comparison.between(before, after, across="devices")
        return
    found = comparison.between(before, after, across=asked)
    assert [one.name for one in found.across] == [environments.TOLD[name]]
    assert found.lines
    assert (*found.unlike, *found.notes) == ()
    assert all(line.labels[-1] == "ACROSS" for line in found.lines)
    assert ("ACROSS", str(found.across[0])) in drawing.facts(before, after, found)
    other = "numpy" if asked != "numpy" else "torch"
    if name in environments.FORBIDS or name in environments.OF_TRIALS:
        with pytest.raises(ValueError, match=rf"unlike=True .* across='{other},{asked}'"):
            comparison.between(before, after, across=other)


def test_a_difference_that_is_not_asked_for_beside_one_that_is_needs_unlike() -> None:
    then = environments.FACTS | {"python": "3.13.1"}
    now = environments.facts("numpy") | {"python": "3.14.2"}
    before, after = report(BEFORE, then), report(AFTER, now)
    with pytest.raises(ValueError, match=r"differ \(numpy: .*\); .*across='python,numpy'"):
        comparison.between(before, after, across="python")
    found = comparison.between(before, after, across="python", unlike=True)
    assert [[one.name for one in some] for some in (found.across, found.unlike)] == [
        ["Python"],
        ["numpy"],
    ]
    assert {line.labels[-2:] for line in found.lines} == {("ACROSS", "UNLIKE")}
    both = comparison.between(before, after, across=["python", "numpy"], unlike=True)
    assert (len(both.across), both.unlike) == (2, [])
    assert {line.labels[-2:] for line in both.lines} == {("CPU-ONLY", "ACROSS")}


def test_a_fact_that_is_asked_for_and_does_not_differ_is_said_and_labels_nothing() -> None:
    before, after = report(BEFORE), report(AFTER)
    found = comparison.between(before, after, across=["torch", "driver"])
    assert found.across == []
    assert [one.partition(":")[0] for one in found.notes] == ["driver", "torch"]
    assert all(("note", one) in drawing.facts(before, after, found) for one in found.notes)
    assert not any("ACROSS" in line.labels for line in found.lines)
    unknown = report(AFTER, FACTS | {"host": {}})
    of_host = comparison.between(before, unknown, across="cores")
    assert of_host.across == [], "it may be the same"
    assert "cores: 2, then unknown" in of_host.notes
    assert not any("ACROSS" in line.labels for line in of_host.lines)


def test_only_a_comparison_across_devices_compares_cases_on_other_devices() -> None:
    gpus = [replace(one, case=replace(one.case, device_kind="cuda")) for one in AFTER]
    after = report([*gpus, *AFTER])
    assert comparison.between(report(BEFORE), report(gpus), across="devices").lines
    lines = comparison.between(report([*gpus, *BEFORE]), after, across="torch").lines
    assert len(lines) == 4
    assert all(line.case == line.other for line in lines)


@pytest.mark.parametrize("name", [*environments.FORBIDS, *environments.OF_TRIALS])
def test_each_fact_that_step_times_depend_on_is_refused_and_named(name: str) -> None:
    before, after = differing(name)
    with pytest.raises(ValueError, match=environments.TOLD[name]):
        comparison.between(before, after)
    past = PastRun(StoredRun("a" * 32, "finished", 1.0, 5, environments.FACTS), before.trials)
    assert comparison.earlier(SINGLE, before, [past])
    assert comparison.earlier(after.trials[0].case, after, [past]) == ""


@pytest.mark.parametrize(
    ("changed", "noted"),
    [
        ({"host": {}}, ["processor: EPYC, then unknown", "cores: 2, then unknown"]),
        ({"python_build": "CPython, GCC"}, ["build of Python: unknown, then CPython, GCC"]),
    ],
)
def test_a_fact_that_only_one_run_recorded_is_noted_and_nothing_is_refused(
    changed: dict[str, Any], noted: list[str]
) -> None:
    before, after = report(BEFORE), report(AFTER, FACTS | changed)
    found = comparison.between(before, after)
    assert [str(one) for one in found.differing] == noted
    assert not found.unlike
    assert not any("UNLIKE" in line.labels for line in found.lines)
    assert ("note", noted[0]) in drawing.facts(before, after, found)
    past = PastRun(StoredRun("a" * 32, "finished", 1.0, 5, FACTS), before.trials)
    said = comparison.earlier(SINGLE, after, [past])
    assert all(one.partition(":")[0] in said for one in noted)


def test_another_size_of_memory_is_noted() -> None:
    before, after = (
        report(BEFORE, facts) for facts in (environments.FACTS, environments.facts("memory_bytes"))
    )
    found = comparison.between(before, after)
    assert [(one.name, one.forbids) for one in found.differing] == [("memory", False)]


def test_another_torch_is_unlike_as_the_workers_say_it() -> None:
    other = [replace(one, provenance={"torch": "2.14.0+cpu"}) for one in AFTER]
    with pytest.raises(ValueError, match=r"torch: 2.13.0\+cpu, then 2.14.0\+cpu"):
        comparison.between(report(BEFORE), report(other))


def test_other_devices_are_the_same_case_only_between_unlike_runs_and_never_emulated_ones() -> None:
    def on(kind: str) -> Report:
        return report([replace(one, case=replace(one.case, device_kind=kind)) for one in AFTER])

    with pytest.raises(ValueError, match="devices: cpu, then cuda"):
        comparison.between(report(BEFORE), on("cuda"))
    lines = comparison.between(report(BEFORE), on("cuda"), unlike=True).lines
    assert [line.name for line in lines] == [
        f"{case.label} (cpu, then cuda)" for case in (DP, SINGLE)
    ]
    assert {line.labels for line in lines} == {("MEASURED", "CPU-ONLY", "UNLIKE")}
    with pytest.raises(ValueError, match="no measured case in common"):
        comparison.between(report(BEFORE), on("emulated"), unlike=True)


def test_a_case_without_a_result_is_undecided_with_its_reason(tmp_path: Path, dpbench: Any) -> None:
    failed = Trial(case=DP, status=Status.OOM, reason="out of memory\nat line 1")
    first = stored(tmp_path / "dpbench.db", BEFORE)
    second = stored(tmp_path / "dpbench.db", [*[one for one in AFTER if one.case != DP], failed])
    code, out, err = dpbench("compare", first[:9], second[:9])
    assert (code, err) == (3, "")
    line, *_ = [line for line in out.splitlines() if "dp[reference]" in line]
    assert line.startswith("undecided ")
    found = json.loads(dpbench("compare", first[:9], second[:9], "--json")[1])
    assert [*found["lost"]] == [DP.label]
    assert '"after"' in found["lost"][DP.label]
    assert "out of memory" in found["lost"][DP.label]
    assert f"{DP.label}: {found['lost'][DP.label]}" in out
    assert "1 case undecided, 1 case same" in out


def on_gpus(trials: Sequence[Trial]) -> list[Trial]:
    return [replace(one, case=replace(one.case, device_kind="cuda")) for one in trials]


def test_a_case_that_a_gpu_lost_is_undecided_across_devices_too(
    tmp_path: Path, dpbench: Any
) -> None:
    failed = Trial(case=DP, status=Status.OOM, reason="out of memory")
    after = on_gpus([*[one for one in AFTER if one.case != DP], failed])
    first = stored(tmp_path / "dpbench.db", BEFORE)
    second = stored(tmp_path / "dpbench.db", after)
    asked = ("compare", first[:9], second[:9], "--across", "devices")
    code, out, err = dpbench(*asked)
    assert (code, err) == (3, "")
    assert "out of memory" in out
    found = json.loads(dpbench(*asked, "--json")[1])
    assert [*found["lost"]] == [DP.label]
    assert found["notes"] == []
    swapped = comparison.between(report(after), report(BEFORE), across="devices")
    assert [case.device_kind for case in swapped.lost] == ["cuda"]


def test_cases_that_only_one_run_has_are_named_in_a_note(tmp_path: Path, dpbench: Any) -> None:
    more = [replace(DP, devices=number) for number in (4, 8, 16, 32, 64)]
    first = stored(tmp_path / "dpbench.db", BEFORE)
    second = stored(
        tmp_path / "dpbench.db",
        [*(one for one in AFTER if one.case != DP), *rounds(*((case, 1, 1) for case in more))],
    )
    code, out, err = dpbench("compare", first[:9], second[:9])
    assert (code, err) == (0, "")
    (note,) = json.loads(dpbench("compare", first[:9], second[:9], "--json")[1])["notes"]
    assert f"note    {note}" in out
    assert [case for case in [DP, *more] if case.label in note] == [DP, *more[: comparison.NAMED]]


def test_each_case_is_compared_with_itself_if_both_runs_have_it_on_each_kind_of_device() -> None:
    other = FACTS | {"packages": {"torch": "2.14.0"}, "host": {"cpu": "Xeon", "cores": 2}}
    mixed = [*BEFORE, *on_gpus(BEFORE)]
    found = comparison.between(report(mixed), report(mixed[::-1], other), unlike=True)
    assert len(found.lines) == 4
    assert all(line.case == line.other for line in found.lines)
    some = comparison.between(report(mixed), report(BEFORE, other), unlike=True)
    assert {*some.alone["before"]} == {one.case for one in on_gpus(BEFORE)}


def test_runs_with_another_library_before_all_others_are_refused() -> None:
    def preloading(value: str) -> Report:
        return report(BEFORE, FACTS | {"variables": provenance.variables({"LD_PRELOAD": value})})

    one, other = preloading("/lib/libjemalloc.so"), preloading("/lib/libtcmalloc.so")
    assert comparison.between(one, preloading("/lib/libjemalloc.so")).notes == []
    with pytest.raises(ValueError, match="variables: LD_PRELOAD="):
        comparison.between(one, other)
    earlier = report(BEFORE, FACTS | {"variables": {"LD_PRELOAD": HIDDEN}})
    for pair in ((earlier, one), (earlier, earlier)):
        (note,) = comparison.between(*pair).notes
        assert note.startswith("LD_PRELOAD: unknown, then ")


def slow(trials: Sequence[Trial], *cases: Case) -> list[Trial]:
    """Return the trials, those of `cases` as if they had only a few steps."""
    return [
        replace(one, provenance={**one.provenance, "slow": one.case in cases}) for one in trials
    ]


def test_a_case_with_few_steps_in_one_run_only_has_no_ratio() -> None:
    for first, second in ((BEFORE, slow(AFTER, DP)), (slow(BEFORE, DP), AFTER)):
        found = comparison.between(report(first), report(second))
        assert [line.case for line in found.lines] == [SINGLE]
        assert set(found.lost) == {DP}
        assert "5.00 ms" in found.lost[DP]
        assert "3.00 ms" in found.lost[DP]
        assert found.verdicts == {"same": 1, "undecided": 1}
    mixed = [*BEFORE, *slow(BEFORE[-1:], DP)]
    assert set(comparison.between(report(mixed), report(slow(AFTER, DP))).lost) == {DP}
    both = comparison.between(report(slow(BEFORE, SINGLE, DP)), report(slow(AFTER, SINGLE, DP)))
    assert {line.verdict for line in both.lines} == {"same", "faster"}
    on_gpu = [replace(one, case=replace(one.case, device_kind="cuda")) for one in slow(AFTER, DP)]
    other = comparison.between(report(BEFORE), report(slow(on_gpu, on_gpu[-1].case)), unlike=True)
    assert [line.case for line in other.lines] == [SINGLE]
    assert set(other.lost) == {DP}


# -- which runs are meant


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """The ids of two runs in the store of this folder, of different commits."""
    first = stored(tmp_path / "dpbench.db", BEFORE, name="base")
    later = {**FACTS, "dpbench": {"commit": "cccc3333"}, "project": {"commit": "dddd4444"}}
    return first, stored(tmp_path / "dpbench.db", AFTER, later)


def test_a_side_is_a_run_a_commit_or_a_file(
    two: tuple[str, str], tmp_path: Path, dpbench: Any
) -> None:
    first, second = two
    elsewhere = tmp_path / "other.db"
    copy = stored(elsewhere, BEFORE)
    stored(elsewhere, AFTER)
    with gzip.open(tmp_path / "trials.jsonl.gz", "wt") as out:
        out.writelines(export.jsonl(first, dp.load(tmp_path / "dpbench.db", first).trials))
    expected = {
        "@base": first,
        first[:9]: first,
        "@last": second,
        "aaaa1": first,
        "bbbb2222": first,
        "cccc": second,
        "dddd4": second,
        f"{elsewhere}:{copy[:9]}": copy,
        f"{tmp_path / 'dpbench.db'}:@base": first,
        str(tmp_path / "trials.jsonl.gz"): first,
    }
    for asked, run_id in expected.items():
        code, text, err = dpbench(
            "compare", asked, "@last", "--json", *["--unlike"] * asked.endswith("gz")
        )
        assert code == 0, asked
        assert ("are the same run" in err) == (run_id == second), asked
        assert json.loads(text)["before"]["run"]["id"] == run_id, asked


def test_a_side_that_is_not_there_or_not_clear_is_a_usage_error(
    two: tuple[str, str], tmp_path: Path, dpbench: Any
) -> None:
    assert "'zzz'" in is_error(*dpbench("compare", "zzz", "@last"))
    assert "'night'" in is_error(*dpbench("compare", "@night", "@last"))
    stored(tmp_path / "dpbench.db", AFTER, {**FACTS, "dpbench": {"commit": "aaaa9999"}})
    said = is_error(*dpbench("compare", "aaaa", "@last"))
    assert "commit aaaa9999, commit aaaa1111;" in said
    assert dpbench("compare", "bbbb2222", "@last")[0] == 0, (
        "of the commit of a project, the newest run"
    )
    both = stored(tmp_path / "dpbench.db", AFTER, {**FACTS, "dpbench": {"commit": two[0]}})
    assert f"commit {two[0][:12]}, run {two[0][:12]}" in is_error(
        *dpbench("compare", two[0][:12], both)
    )


# -- the forms of the result


def test_the_text_has_both_sides_and_a_line_per_case_and_the_code_says_the_worst(
    two: tuple[str, str], dpbench: Any
) -> None:
    first, second = two
    code, out, err = dpbench("compare", "@base", "@last")
    assert (code, err) == (0, "")
    before, after, _, head, rule, *lines = out.splitlines()
    assert before.startswith(f"before  {first[:8]}  @base  20")
    assert before.split("  ")[-3:] == [
        "dpbench 0.1.0 commit aaaa1111 dirty",
        "project commit bbbb2222",
        "EPYC, 2 cores",
    ]
    assert after.startswith(f"after   {second[:8]}  20")
    assert head.split() == [
        "verdict",
        "case",
        "ratio",
        "99",
        "%",
        "before,",
        "ms",
        "after,",
        "ms",
    ]
    assert set(rule) == {"-", " "}
    assert lines[0].startswith(f"faster   {DP.label}  1.66")
    assert lines[0].endswith("      5.00       3.00")
    below = " ".join(" ".join(lines[3:]).split())
    assert below.startswith(f"compared cases: MEASURED CPU-ONLY {DP.label}: backward −2.00")
    assert "1 case faster, 1 case same" in below
    assert dpbench("compare", "@last", "@base")[0] == 1


def test_the_json_is_one_documented_record(two: tuple[str, str], dpbench: Any) -> None:
    code, out, err = dpbench("compare", "@base", "@last", "--json")
    assert (code, err) == (0, "")
    found = msgspec.json.decode(out, type=comparing.ComparedRuns)
    assert json.loads(msgspec.json.encode(found)) == json.loads(out), (
        "the JSON has exactly the keys of the record"
    )
    assert (found.before.run.name, found.before.run.commit, found.after.run.id) == (
        "base",
        "aaaa1111",
        two[1],
    )
    assert (found.after.project_commit, found.unlike, found.notes, found.lost, found.margin) == (
        "dddd4444",
        [],
        [],
        {},
        0.01,
    )
    assert found.before.answers[0].subject == "mlp"
    faster, same = found.cases
    assert (faster.verdict, faster.phase, faster.labels) == (
        "faster",
        "backward",
        ["MEASURED", "CPU-ONLY"],
    )
    assert faster.ratio is not None
    assert faster.ratio.low < faster.ratio.value < faster.ratio.high
    assert faster.ratio.value == pytest.approx(5 / 3, rel=0.01)
    assert faster.before is not None
    assert (faster.before.value, faster.before.n) == (pytest.approx(0.005, rel=0.01), 5)
    assert same.verdict == "same"
    assert "leave out one" in is_error(*dpbench("compare", "@base", "@last", "--json", "--md"))


def test_markdown_is_a_table_with_escaped_text(tmp_path: Path, dpbench: Any) -> None:
    facts = {**FACTS, "host": {**FACTS["host"], "cpu": "a|b*"}}
    stored(tmp_path / "a.db", BEFORE, facts)
    stored(tmp_path / "b.db", AFTER, facts)
    code, out, err = dpbench("compare", tmp_path / "a.db", tmp_path / "b.db", "--md")
    assert (code, err) == (0, "")
    heading, _, before, *_ = out.splitlines()
    assert (amounts(heading), before.startswith("- before: ")) == (["1", "1"], True)
    assert r"a\|b\*, 2 cores" in out
    table = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 2
    assert {line.count(" | ") for line in table} == {7}


def runs_of(folder: Path) -> list[dp.Run]:
    """Return the two runs of the store in a folder, the older one first."""
    with Store.read(folder / "dpbench.db") as store:
        return [dp.load(store.path, run.id) for run in store.runs()[::-1]]


@pytest.mark.parametrize(
    ("single", "dp_case", "said"),
    [
        (0.004, 0.003, r"the same \(1\.00×.* the speed\)"),
        (0.002, 0.003, r"faster \(1\.5\d× .* the speed\), .* in backward \(−"),
        (0.008, 0.015, r"slower \(0\.6\d*× .* the speed\), .* in backward \(\+"),
    ],
)
def test_an_answer_compares_its_case_with_the_newest_earlier_run_on_a_like_machine(
    tmp_path: Path, single: float, dp_case: float, said: str
) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, AFTER)
    first = stored(path, BEFORE)
    other = {**FACTS, "host": {"name": "bench-08", "cpu": "Xeon", "cores": 8}}
    stored(path, rounds((SINGLE, 0.05, 0.05)), other)
    last = stored(path, rounds((SINGLE, 0.002, single), (DP, 0.002, dp_case)))
    earlier, *_, newest = dp.load(path, first), dp.load(path, last)
    assert re.search(f"^against run {first[:8]} of .*: {said}", newest.answers[0].earlier)
    assert earlier.answers[0].earlier.startswith("against run ")
    oldest = runs_of(tmp_path)[0]
    assert oldest.answers[0].earlier == ""


def test_too_few_rounds_are_no_earlier_speed(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    first = stored(path, BEFORE)
    few = dp.load(path, stored(path, [one for one in BEFORE if one.round < 2]))
    assert few.answers[0].earlier.startswith(f"against run {first[:8]}")
    assert "the speed" not in few.answers[0].earlier


@pytest.mark.parametrize(
    "changed",
    [
        {"source": Source.PREDICTED},
        {"case": replace(SINGLE, device_kind="cuda"), "provenance": {"gpu": "Fake GPU"}},
    ],
    ids=["predicted", "fake GPUs"],
)
def test_times_that_nobody_measured_are_compared_with_no_earlier_run(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "dpbench.db"
    trials = [replace(one, **changed) for one in BEFORE if one.case == SINGLE]
    stored(path, trials)
    again = dp.load(path, stored(path, trials)).analysis
    assert len(again.past) == 2
    assert comparison.earlier(trials[0].case, again, again.past[:1]) == ""


def test_the_page_has_the_sections_of_a_run_with_both_runs_in_each_and_needs_no_network(
    tmp_path: Path, dpbench: Any
) -> None:
    wrong = [replace(one, case=replace(one.case, model=HOSTILE)) for one in BEFORE]
    first = stored(tmp_path / "dpbench.db", [*BEFORE, *wrong])
    second = stored(tmp_path / "dpbench.db", [*AFTER, *wrong])
    page = tmp_path / "new" / "page.html"
    code, _, err = dpbench("compare", first, second, "--report", page)
    assert (code, err) == (0, f"page: {page}\n")
    text = page.read_text()
    assert HOSTILE not in text
    assert not {"http:", "https:", "src=", "<link", "url("} & {*text.split()}
    sections = re.findall(r'<section id="([^"]*)"', text)
    assert sections[:4] == ["answers", "lanes", "speedup", "cases"]
    assert {"phases", "steps"} < {*sections}
    assert text.count('<tbody class="case"') == 4
    assert "unsafe-inline" not in text
    assert not re.search(r"<[^<>]* style=", text), "the policy allows the style sheet alone"
    cards = re.findall(r'<article class="card( \w+)?".*?</article>', text, re.DOTALL)
    assert cards == [" faster", ""], "the verdicts on each model"
    assert text.count("<p>Before and after: ") == 1, "the answer on mlp has changed"
    assert (text.count("<p>Before: "), text.count("<p>After: ")) == (1, 1)
    said = unescape(text)
    runs = runs_of(tmp_path)
    for answer in (answer for run in runs for answer in run.answers):
        assert answer.headline in said
    assert 'data-status="faster"' in text
    assert '<td class="verdict text" data-sort="faster">faster</td>' in text
    for section in ("lanes", "speedup", "phases", "steps"):
        content = text.partition(f'<section id="{section}"')[2].partition("</section>")[0]
        for run in ("before", "after"):
            assert re.search(rf"dp(\[reference\])?( ×2,?)? {run}", content), (section, run)
    again = runs[0].compare(runs[1]).page(tmp_path / "again.html")
    assert again.read_text() == text, "the same runs give the same page"


def test_the_lanes_of_both_runs_have_one_time_axis_and_are_described() -> None:
    sides = [report(BEFORE[5:]), report(AFTER[5:])]
    both = drawing.TwoRuns.compared_by(*sides, comparison.between(*sides))
    with svg.theme():
        (panel,) = swim_lanes.section(both, both.rows).panels
    widths: dict[str, list[float]] = {}
    for name, path in re.findall(
        r'<g[^>]* data-bar="">\s*<title>(\w+) on device 0[^<]*</title>\s*<path d="([^"]*)"',
        panel.svg,
    ):
        at = [float(x) for x in re.findall(r"[ML] (-?[\d.]+)", path)]
        widths.setdefault(name, []).append(max(at) - min(at))
    assert widths["forward"][0] == pytest.approx(widths["forward"][1], rel=0.02), (
        "2 ms on both sides"
    )
    assert widths["backward"][0] == pytest.approx(3 * widths["backward"][1], rel=0.02), (
        "3 ms, then 1 ms"
    )
    which = r"step \d of round \d, closest to the medians of its 8 timed steps\."
    for run, took in (("before", r"5\.0\d*"), ("after", r"[23]\.[09]\d*")):
        assert re.search(f"dp ×2, {run}: a step of {took} ms, {which}", panel.svg), run


def test_a_row_of_either_run_has_the_numbers_of_its_own_run_even_on_other_devices() -> None:
    on_gpu = [
        replace(one, case=replace(one.case, device_kind="cuda", device_ids=())) for one in AFTER
    ]
    sides = [report(BEFORE), report(on_gpu)]
    both = drawing.TwoRuns.compared_by(*sides, comparison.between(*sides, unlike=True))
    assert [(row.run, row.case.device_kind) for row in both.rows] == [
        ("before", "cuda"),
        ("after", "cuda"),
    ] * 2
    for row in both.rows:
        own = sides[row.run == "after"]
        case = replace(row.case, device_kind="cpu") if row.run == "before" else row.case
        assert {one.case for one in both.trials_of(row)} == {case}
        assert row.step == next(one.step for one in own.rows if one.case == case)
        lanes = both.lanes_of(row)
        assert lanes
        assert lanes == own.lanes[case, row.source]


def test_the_numbers_of_the_page_are_those_of_the_table() -> None:
    found = comparison.between(report(BEFORE), report(AFTER))
    dp_, single = drawing.numbers(found)
    assert (dp_["verdict"], dp_["phase"], single["verdict"]) == ("faster", "backward", "same")
    assert dp_["ratio_value"] == found.lines[0].ratio.value
    assert (dp_["before_low"], dp_["after_high"]) == (
        found.lines[0].before.low,
        found.lines[0].after.high,
    )
    assert dp_["ratio_withheld"] is None


def test_python_compares_like_the_command(
    two: tuple[str, str], tmp_path: Path, dpbench: Any
) -> None:
    first, second = (dp.load(tmp_path / "dpbench.db", run) for run in two)
    found = first.compare(second)
    assert amounts(repr(found)) == ["1", "1"]
    assert str(found) + "\n" == dpbench("compare", *two)[1]
    assert str(first.compare(two[1][:9])) == str(first.compare("@last")) == str(found)
    assert [line.verdict for line in found.cases] == ["faster", "same"]
    html = found._repr_html_()
    assert "<script" not in html
    assert html.count("<tr>") == 3
    assert "backward −2.00 ms" in html
    with pytest.raises(ValueError, match="no run whose id begins with 'zzz'"):
        first.compare("zzz")
    other = stored(tmp_path / "dpbench.db", AFTER, {**FACTS, "host": {"cpu": "Xeon", "cores": 2}})
    with pytest.raises(ValueError, match="give unlike=True"):
        first.compare(other)
    assert [str(one) for one in first.compare(other, unlike=True).unlike] == [
        "processor: EPYC, then Xeon"
    ]


def test_the_help_says_the_exit_codes(dpbench: Any) -> None:
    code, out, _ = dpbench("compare", "--help")
    assert code == 0
    for meaning in (
        "0    no case became slower",
        "1    at least one",
        "2    a file",
        "3    no case",
        "64   wrong usage",
        "141  the reader",
    ):
        assert meaning in out


def test_the_command_compares_across_facts_as_text_as_markdown_as_json_and_in_python(
    tmp_path: Path, dpbench: Any
) -> None:
    first = stored(tmp_path / "dpbench.db", BEFORE)
    newer = [replace(one, provenance={"torch": "2.14.0+cpu"}) for one in AFTER]
    second = stored(tmp_path / "dpbench.db", newer)
    two = (first[:12], second[:12])
    code, out, err = dpbench("compare", *two, "--across", "numpy")
    assert (code, out) == (64, "")
    assert "--across numpy,torch" in err
    assert "--unlike" in err
    code, out, err = dpbench("compare", *two, "--across", "torhc")
    assert (code, out) == (64, "")
    assert "did you mean 'torch'?" in err
    said = "torch: 2.13.0+cpu, then 2.14.0+cpu"
    code, out, err = dpbench("compare", *two, "--across", "torch,numpy")
    assert (code, err) == (0, "")
    assert f"ACROSS  {said}" in out
    assert "note    numpy: " in out
    assert "compared cases: MEASURED CPU-ONLY ACROSS" in out
    assert out == dpbench("compare", *two, "--across", "torch", "--across", "numpy")[1]
    markdown = dpbench("compare", *two, "--across", "torch", "--md")[1]
    assert said in markdown
    assert "ACROSS" in markdown.replace(said, "")
    plain = json.loads(dpbench("compare", *two, "--across", "torch", "--json")[1])
    assert (plain["across"], plain["unlike"], plain["notes"]) == ([said], [], [])
    found = dp.load(tmp_path / "dpbench.db", first).compare(second, across="torch")
    assert [str(one) for one in found.across] == [said]
    assert "ACROSS" in found._repr_html_()


def test_predictions_are_not_compared() -> None:
    predicted = [replace(one, source=Source.PREDICTED) for one in BEFORE]
    with pytest.raises(ValueError, match="no measured case"):
        comparison.between(report(predicted), report(predicted))


def test_like_runs_are_not_labelled_unlike() -> None:
    found = comparison.between(report(BEFORE), report(AFTER), unlike=True)
    assert found.lines
    assert not any("UNLIKE" in line.labels for line in found.lines)
