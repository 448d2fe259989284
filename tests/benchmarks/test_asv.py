"""asv: configuration, `make history`, its resumption, results saved as benchmarks end, the site."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.amounts import amounts

asv = pytest.importorskip("asv", reason="a GPU machine lends its own packages, and may have no asv")

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "asv.conf.json"


# --------------------------------------------------------------------------------------------------
# the configuration


def config() -> dict[str, Any]:
    text = re.sub(r'^((?:[^"/]|"[^"]*")*)//.*$', r"\1", CONFIG.read_text(), flags=re.MULTILINE)
    return json.loads(text)


def test_configuration_agrees_with_the_project() -> None:
    conf, project = config(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    dependencies = {re.match(r"[\w-]+", line).group() for line in project["dependencies"]}
    requirements = conf["matrix"]["req"]
    assert conf["project"] == project["name"]
    assert requirements.pop("pip+asv_runner") == [pinned["asv_runner"]]
    assert set(requirements) == dependencies - {"asv"}, "asv measures from outside"
    assert requirements["torch"] == [pinned["torch"]]
    for command in (*conf["build_command"], *conf["install_command"]):
        assert "--no-deps" in command
    assert all(conf[name].startswith(".asv/") for name in ("env_dir", "results_dir", "html_dir"))


# --------------------------------------------------------------------------------------------------
# asv itself


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return an environment in which neither asv nor git touches the user's files."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GIT_", "ASV_", "PYTHON"))
    }
    identity = {
        f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    return kept | identity | {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"} | more


TINY = """
from importlib.util import find_spec

def track_value():
    import dpbench
    return {"samples": [dpbench.VALUE + i for i in (0, 1, 2, 3, 10)], "number": 1}
track_value.unit = "seconds"
track_value.version = "1"

def setup_later():
    if find_spec("dpbench.later") is None:
        raise NotImplementedError

def track_later():
    from dpbench import later
    return later.VALUE
track_later.setup = setup_later
"""

FINDER = """
# what setuptools installs for an editable package
import sys
from importlib.machinery import PathFinder

MAPPING = {{"dpbench": "{package}"}}

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "dpbench":
            return PathFinder.find_spec(name, [MAPPING[name].rpartition("/")[0]])
        parent, _, _ = name.rpartition(".")
        return PathFinder.find_spec(name, path=[MAPPING[parent]]) if parent in MAPPING else None

def install():
    sys.meta_path.append(Finder)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a git repository: a configuration like ours, a package of one number, and its suite."""
    folder = tmp_path / "project"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "reports").mkdir()
    conf = config()
    conf.update(matrix={}, pythons=[f"{sys.version_info[0]}.{sys.version_info[1]}"])
    (folder / "asv.conf.json").write_text(json.dumps(conf))
    shutil.copy(ROOT / "benchmarks/history.sh", folder / "benchmarks")
    for name in ("asv_offline.py", "asv_history.py", "asv_files.js"):
        shutil.copy(ROOT / "reports" / name, folder / "reports")
    (folder / "benchmarks/__init__.py").touch()
    (folder / "benchmarks/tiny.py").write_text(TINY)
    git(folder, "init", "--quiet", "--initial-branch", "topic")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "Before the package")
    return folder


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit_value(project: Path, value: float, module: str = "__init__") -> str:
    """Commit the package with this number in a module of it; return the commit."""
    (project / "dpbench").mkdir(exist_ok=True)
    (project / "dpbench" / f"{module}.py").write_text(f"VALUE = {value}\n")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", f"Value {value}")
    return git(project, "rev-parse", "HEAD")


def results(project: Path, commit: str, name: str) -> dict[str, Any]:
    """Return what asv stored for a benchmark of the tiny suite: its columns by name."""
    (file,) = (project / ".asv/results").glob(f"*/{commit[:8]}-existing-*.json")
    stored = json.loads(file.read_text())
    return dict(zip(stored["result_columns"], stored["results"][f"tiny.{name}"], strict=False))


@pytest.fixture
def tools(project: Path, tmp_path: Path) -> Path:
    """Make a folder for PATH: an npm without network, a python with an editable install."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "_finder.py").write_text(FINDER.format(package=project / "dpbench"))
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "history.pth").write_text(
        "\n".join([*paths, "import _finder; _finder.install()", ""])
    )
    npm = tmp_path / "venv/bin/npm"
    npm.write_text("#!/bin/sh\nexit 1\n")
    npm.chmod(0o755)
    return npm.parent


def history(project: Path, tools: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run history.sh on the project."""
    path, temporary = f"{tools}{os.pathsep}{os.environ['PATH']}", str(tools.parent)
    return subprocess.run(
        ["sh", project / "benchmarks/history.sh"],
        cwd="/",
        env=environment(tools.parent, PATH=path, TMPDIR=temporary, DPBENCH_GPUS="0", **more),
        capture_output=True,
        text=True,
        check=False,
    )


def test_asv_suite_can_be_discovered(tmp_path: Path) -> None:
    conf = config() | {"benchmark_dir": str(ROOT / "benchmarks"), "plugins": [], "dvcs": "none"}
    (tmp_path / "asv.conf.json").write_text(json.dumps(conf))
    command = [sys.executable, "-m", "asv", "check", "--environment", f"existing:{sys.executable}"]
    env = environment(tmp_path, ASV_PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_history_measures_each_commit_and_asv_takes_samples_as_timings(
    project: Path, tools: Path
) -> None:
    """Asv does not document how it treats {"samples", "number"}; the suite depends on it."""
    first, second, third = (
        commit_value(project, 1.5),
        commit_value(project, 7.5),
        commit_value(project, 4.0, "later"),
    )
    for module in ("__init__", "later"):
        (project / "dpbench" / f"{module}.py").write_text("VALUE = 99.0\n")
    (project / "benchmarks/verbs.py").write_text(TINY)
    done = history(project, tools, COMMITS="5", ROUNDS="2", PYTHONPATH=str(project))
    assert done.returncode == 0, done.stdout + done.stderr
    turns = re.findall(r" Value ([\d.]+)\n", done.stderr)
    there = ["1.5", "7.5", "4.0"]
    assert turns == [*there, *there[::-1]] * 2, "each round in turn for verbs, then for tiny"
    assert "rounds in common" in done.stderr
    (wanted,) = (line for line in done.stderr.splitlines() if "requested commits" in line)
    assert amounts(wanted) == ["4", "5"], "the commits that there are"
    assert "Before the package: skipped" in done.stderr
    assert "uncommitted changes in dpbench/" in done.stderr
    assert "the page needs a network" in done.stdout
    for commit, value in ((first, 1.5), (second, 7.5), (third, 7.5)):
        columns = results(project, commit, "track_value")
        assert columns["result"] == [value + 2]
        assert columns["stats_repeat"] == [10], "two rounds of five"
        assert columns["stats_number"] == [1]
        assert value <= columns["stats_ci_99_a"][0] <= value + 2 <= columns["stats_ci_99_b"][0]
        assert sorted(columns["samples"][0]) == sorted([value + i for i in (0, 1, 2, 3, 10)] * 2)
    later = [
        results(project, commit, "track_later")["result"][0] for commit in (first, second, third)
    ]
    assert [str(value) for value in later] == [
        "nan",
        "nan",
        "4.0",
    ], "nothing comes from the working tree"
    index = json.loads((project / ".asv/html/index.json").read_text())
    assert set(index["revision_to_hash"].values()) == {first, second, third}
    assert not list(tools.parent.glob("tmp.*")), "the unpacked commits are gone"
    assert "expected time: unknown" in done.stderr
    assert "the page needs no server" in done.stderr
    again = history(project, tools, COMMITS="1", BENCH="value", ROUNDS="2")
    assert again.returncode == 0
    (expected,) = (line for line in again.stderr.splitlines() if "results to measure" in line)
    assert amounts(expected)[:3] == ["0", "2", "2"], "to measure, rounds, measured earlier"
    assert len(re.findall(r" Value 4\.0: ", again.stderr)) == 1, "nothing is measured for it"
    more = history(project, tools, COMMITS="2", BENCH="verbs.track_value", ROUNDS="3")
    assert more.returncode == 0, more.stdout + more.stderr
    assert re.findall(r" Value ([\d.]+)\n", more.stderr) == there[1:], "only the third round"
    (file,) = (project / ".asv/results").glob(f"*/{third[:8]}-existing-*.json")
    stored = json.loads(file.read_text())
    columns = dict(
        zip(stored["result_columns"], stored["results"]["verbs.track_value"], strict=False)
    )
    assert columns["stats_repeat"] == [15]
    assert "0 of 1 differences" in more.stderr, "both have the value 7.5"


def test_history_fails_when_a_benchmark_does(project: Path, tools: Path) -> None:
    commit_value(project, 1.5)
    (project / "dpbench/__init__.py").write_text("")
    git(project, "commit", "--all", "--quiet", "--message", "Value lost")
    done = history(project, tools, COMMITS="1", ROUNDS="1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "COMMITS" not in done.stderr
    assert (project / ".asv/html/index.html").exists(), (
        "what was measured is published all the same"
    )


def test_history_refuses_nonsense(project: Path, tools: Path) -> None:
    done = history(project, tools, COMMITS="three")
    assert done.returncode == 64
    assert "COMMITS must be" in done.stderr
    assert "'three'" in done.stderr


# --------------------------------------------------------------------------------------------------
# what was measured, and what is missing


def plugin(name: str) -> ModuleType:
    """Import a plugin of asv from its file."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"reports/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMIT = "c0ffee" * 6 + "1234"


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the plugin that saves results, in a folder with a list of three benchmarks."""
    from asv.results import Results

    monkeypatch.setattr(Results, "add_result", Results.add_result)  # which the plugin replaces
    monkeypatch.setenv("DPBENCH_QUICK", "1")
    monkeypatch.delenv("AGAIN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".asv/results").mkdir(parents=True)
    known = {name: {"version": "1"} for name in ("a.one", "a.two", "b.three")}
    (tmp_path / ".asv/results/benchmarks.json").write_text(json.dumps(known | {"version": 2}))
    module = plugin("asv_history")
    module.setup()
    return module


def end(results: Any, name: str, value: float | None = 1.0, *, again: bool = False) -> None:
    """Let a round of a benchmark end in asv; `again` adds it to the rounds before."""
    from asv.runner import BenchmarkResult

    result = BenchmarkResult([value], [[value] if value else None], [1], 0, "", None)
    results.add_result(
        {"name": name, "version": "1", "params": []},
        result,
        record_samples=True,
        append_samples=again,
    )


def a_commit() -> Any:
    from asv.results import Results

    return Results({"machine": "m"}, {}, COMMIT, 0, "3.11", "existing-py", {})


def test_results_are_saved_as_each_benchmark_ends_and_lack_their_other_rounds(
    saving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDS", "2")
    results = a_commit()
    assert saving.selection(COMMIT, "") == [
        rf"--bench=^{one}(\(|$)" for one in (r"a\.one", r"a\.two", r"b\.three")
    ]
    end(results, "a.two")
    end(results, "a.one")
    assert {name for name, _ in saving.stored(COMMIT)} == {"a.one", "a.two"}
    assert saving.missing(COMMIT, "", 1) == ["b.three"]
    every = ["a.one", "a.two", "b.three"]
    assert saving.missing(COMMIT, "", 2) == saving.missing(COMMIT, "") == every
    assert saving.selection(COMMIT, "", 2, "a")[-1] == "--append-samples"
    end(results, "a.two", again=True)
    assert saving.missing(COMMIT, "") == ["a.one", "b.three"]
    end(results, "a.two")
    assert saving.missing(COMMIT, "a.two") == ["a.two"], "it was measured again from the start"
    end(results, "a.two", again=True)
    end(results, "a.one", again=True)
    assert saving.missing(COMMIT, "") == ["b.three"]
    assert saving.missing("0" * 40, "three") == ["b.three"]
    for again in (False, True):
        end(results, "b.three", value=None, again=again)
    assert saving.missing(COMMIT, "") == ["b.three"], "a failure is measured again"
    assert saving.selection(COMMIT, "a") == []
    assert saving.groups("") == ["a", "b"]
    assert saving.selection(COMMIT, "", 1, "a") == []
    assert saving.selection(COMMIT, "", 1, "b") == [r"--bench=^b\.three(\(|$)"]
    assert saving.selection(COMMIT, "resnet18") == ["--bench=resnet18"], (
        "asv compares it with parameters"
    )


def test_differences_between_commits_are_those_that_their_rounds_decide(
    saving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drift between rounds is in both commits; the second takes 20 % longer in a.two alone."""
    drift = (1.0, 1.6, 0.7, 1.2, 0.9)
    noise = ((1.0, 1.02, 0.99, 1.0, 0.98), (1.01, 0.98, 1.0, 1.01, 1.0))
    other = "0" * 40
    for commit, factors, longer in ((COMMIT, noise[0], 1.0), (other, noise[1], 1.2)):
        results = a_commit()
        results._commit_hash = commit
        for number, (slow, factor) in enumerate(zip(drift, factors, strict=True)):
            end(results, "a.one", slow * factor, again=number > 0)
            end(results, "a.two", slow * factor * longer, again=number > 0)
            end(results, "b.three", 1.0 if number < 2 else None, again=number > 0)
    first, *decided, last = saving.differences([COMMIT, other], "")
    assert first.startswith("1 of 2 differences")
    (found,) = decided
    assert re.match(r"a\.two, 0{8} after c0ffee.*: 1\.2\d?x", found)
    assert "(median; " in last
    assert "nothing is compared" in saving.differences([COMMIT], "")[0]


def test_a_full_result_stands_for_a_quick_one_but_not_the_reverse(
    saving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDS", "1")
    results = a_commit()
    end(results, "a.one")
    monkeypatch.setenv("DPBENCH_QUICK", "0")
    end(results, "a.two")
    assert saving.missing(COMMIT, "a") == ["a.one"]
    monkeypatch.setenv("DPBENCH_QUICK", "1")
    assert saving.missing(COMMIT, "a") == []
    monkeypatch.setenv("AGAIN", "1")
    assert saving.missing(COMMIT, "a") == ["a.one", "a.two"]
    assert saving.missing(COMMIT, "a", 2) == ["a.one", "a.two"], "after the first round, the others"


def test_the_expected_time_is_that_of_earlier_results_with_the_same_effort(
    saving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDS", "2")
    notes = {
        "1": {
            "a.one": {"effort": "quick", "seconds": 4.0, "medians": [[1.0]] * 2},
            "a.two": {"effort": "full", "seconds": 900.0, "medians": [[1.0]] * 2},
        },
        "2": {"a.one": {"effort": "quick", "seconds": 4.0, "medians": [[1.0]]}},
    }
    Path(".asv", saving.EFFORTS).write_text(json.dumps(notes))
    one, both = saving.expect([COMMIT, "0" * 40], "a.one"), saving.expect([COMMIT], "a")
    assert amounts(one) == ["2", "2", "0", "12 s"], "to measure, rounds, measured earlier, time"
    assert amounts(both) == ["2", "2", "0", "6 s"]
    assert ("at least" in one, "at least" in both) == (False, True)
    assert both.endswith(": a.two"), "it has no earlier result with this effort"
    assert "expected time: unknown" in saving.expect([COMMIT], "b")
    assert "no benchmark's name matches" in saving.expect([COMMIT], "resnet18")


# --------------------------------------------------------------------------------------------------
# the page


@pytest.fixture
def offline() -> ModuleType:
    return plugin("asv_offline")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Copy the page of the asv that is installed."""
    html = tmp_path / "html"
    html.mkdir()
    shutil.copy(Path(asv.__file__).parent / "www/index.html", html)
    return html / "index.html"


def vendored(offline: ModuleType, tmp_path: Path) -> Path:
    """Make a folder like npm's, each file holding its own name."""
    modules = tmp_path / "vendor" / "node_modules"
    for path in offline.FILES.values():
        (modules / path).parent.mkdir(parents=True, exist_ok=True)
        (modules / path).write_text(path)
    return modules


def test_page_loads_nothing_from_elsewhere(offline: ModuleType, page: Path, tmp_path: Path) -> None:
    before = page.read_text()
    message = offline.localise(page.parent, vendored(offline, tmp_path))
    text = page.read_text()
    assert amounts(message)[0] == str(len(offline.FILES)) == "10"
    loads = re.findall(r"<(?:script|link|img)\b[^>]*>", text)
    assert len(loads) == len(re.findall(r"<(?:script|link|img)\b[^>]*>", before))
    assert not [tag for tag in loads if "//" in tag]
    assert not re.search(r"\b(?:integrity|crossorigin|referrerpolicy)=", text)
    for name, path in offline.FILES.items():
        assert f'"vendor/{name}"' in text
        assert (page.parent / "vendor" / name).read_text() == path


@pytest.mark.parametrize("lost", ["everything", "one file"])
def test_page_without_the_files_stays_and_says_how(
    offline: ModuleType, page: Path, tmp_path: Path, lost: str
) -> None:
    modules, before = tmp_path / "vendor" / "node_modules", page.read_text()
    if lost == "one file":
        (vendored(offline, tmp_path) / offline.FILES["md5.min.js"]).unlink()
    message = offline.localise(page.parent, modules)
    assert page.read_text() == before
    assert message.startswith("the page needs a network")
    assert f"npm install --ignore-scripts --prefix {modules.parent} jquery@3.3.1" in message
    assert "\n" not in message


def test_page_of_another_asv_stays_and_says_so(
    offline: ModuleType, page: Path, tmp_path: Path
) -> None:
    page.write_text(page.read_text().replace("jquery-3.3.1.min.js", "jquery-9.js"))
    before = page.read_text()
    message = offline.localise(page.parent, vendored(offline, tmp_path))
    assert page.read_text() == before
    assert "jquery-9.js" in message


def test_the_data_of_the_page_are_a_script_beside_it(offline: ModuleType, page: Path) -> None:
    html = page.parent
    (html / "graphs").mkdir()
    (html / "graphs/a.json").write_text("[[1, NaN], [2, 0.5]]")
    trials = html.parent / "trials"
    trials.mkdir()
    for run in ("r1", "r2"):
        entry = {
            "benchmark": "b",
            "params": ["1"],
            "commit": "c",
            "run": run,
            "store": "s",
            "fingerprints": [],
            "noisy": run == "r2",
        }
        with (trials / "c.jsonl").open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
    efforts = {"c": {"b": {"effort": "full"}}, "d": {"b": {"effort": "quick"}}}
    (html.parent / "efforts.json").write_text(json.dumps(efforts))
    for _ in range(2):
        assert amounts(offline.embed(html))[0] == "1", "file"
        assert page.read_text().count('src="asv_data.js"') == 1
    files, found, doubtful = re.findall(
        r"^const \w+ = (.*);$", (html / "asv_data.js").read_text(), re.MULTILINE
    )
    assert json.loads(files) == {"graphs/a.json": [[1, None], [2, 0.5]]}
    assert [one["run"] for one in json.loads(found)["b"]] == ["r2"], (
        "the last of equal commits and parameters"
    )
    assert json.loads(doubtful) == {"b": ["c", "d"]}, "c is NOISY, d is quick"
    page.write_text(page.read_text().replace("asv.js", "other.js").replace("asv_data.js", ""))
    assert offline.embed(html).startswith("the page needs a server")


def test_the_page_has_steps_and_verbs_first_and_no_benchmark_without_a_result(
    offline: ModuleType,
) -> None:
    names = ("imports.a", "reading.none", "steps.b", "verbs.c", "cuda.empty")
    values = {"imports.a": 1.0, "steps.b": 2.0, "verbs.c": 3.0, "reading.none": None}
    files: dict[str, Any] = {"index.json": {"benchmarks": {name: {"name": name} for name in names}}}
    files |= {f"graphs/summary/{name}.json": [[1, value]] for name, value in values.items()}
    assert list(offline._shown(files)) == ["steps.b", "verbs.c", "imports.a"]


def test_plugin_needs_neither_torch_nor_dpbench(offline: ModuleType) -> None:
    code = "import sys, asv_offline; sys.exit(bool({'torch', 'dpbench'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "reports", check=True)
    listed = subprocess.run(
        [sys.executable, offline.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert listed.split() == list(offline.PACKAGES)
    assert {path.partition("/")[0] for path in offline.FILES.values()} == {
        p.partition("@")[0] for p in offline.PACKAGES
    }
