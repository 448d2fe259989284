"""A site that asv publishes from results made by hand, and the libraries that its page loads.

python tests/asv_site.py     fetch the libraries, so that no test needs a network, or fail
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
VENDOR = ROOT / "build/asv-vendor"
"""The folder of the libraries, which git ignores, so that they are fetched once."""


class UnavailableError(Exception):
    """The libraries are not here, and cannot be fetched."""


def offline() -> ModuleType:
    """Import the plugin that makes the page work without a network."""
    spec = importlib.util.spec_from_file_location("asv_offline", ROOT / "reports/asv_offline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def libraries() -> Path:
    """Return npm's folder with the libraries, fetched if they are not here.

    Raises UnavailableError if impossible.
    """
    modules = VENDOR / "node_modules"
    plugin = offline()
    if all((modules / file).exists() for file in plugin.FILES.values()):
        return modules
    npm = shutil.which("npm")
    if not npm:
        raise UnavailableError("there is no npm on this system")
    VENDOR.mkdir(parents=True, exist_ok=True)
    command = [
        npm,
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        f"--prefix={VENDOR}",
    ]
    done = subprocess.run(
        [*command, *plugin.PACKAGES], cwd=VENDOR, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UnavailableError(
            f"npm cannot fetch the libraries of asv's page: {done.stderr.strip()[-200:]}"
        )
    return modules


BENCHMARK = "tiny.track_value"


def publish(folder: Path, values: list[float]) -> Path:
    """Publish a site with one benchmark and one value per commit in a new git repository.

    Return the site's folder.

    The first commit's result has a trial in a store, and the second's is from quick mode. The
    site's page needs no network and no server.
    """
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "ASV_"))
    }
    env |= {
        f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    env |= {"HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}

    def run(*command: str) -> str:
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=True
        ).stdout.strip()

    run("git", "init", "--quiet")
    conf = {
        "version": 1,
        "project": "tiny",
        "repo": ".",
        "branches": ["HEAD"],
        "results_dir": "asv/results",
        "html_dir": "asv/html",
        "benchmark_dir": "benchmarks",
    }
    (folder / "asv.conf.json").write_text(json.dumps(conf))
    machine = folder / "asv/results/m"
    machine.mkdir(parents=True)
    facts = {"machine": "m", "arch": "", "cpu": "", "num_cpu": "2", "os": "", "ram": ""}
    (machine / "machine.json").write_text(json.dumps(facts | {"version": 1}))
    described = {
        "code": "",
        "name": BENCHMARK,
        "param_names": [],
        "params": [],
        "timeout": 60,
        "type": "track",
        "unit": "seconds",
        "version": "1",
    }
    (machine.parent / "benchmarks.json").write_text(
        json.dumps({BENCHMARK: described, "version": 2})
    )
    commits = []
    for number, value in enumerate(values):
        run("git", "commit", "--quiet", "--allow-empty", "--message", f"{number}")
        commits.append(run("git", "rev-parse", "HEAD"))
        result = {
            "commit_hash": commits[-1],
            "env_name": "existing-py",
            "date": 1_700_000_000_000 + number * 86_400_000,
            "params": facts | {"python": "3.11"},
            "python": "3.11",
            "requirements": {},
            "env_vars": {},
            "result_columns": ["result", "params", "version"],
            "results": {BENCHMARK: [[value], [], "1"]},
            "durations": {},
            "version": 2,
        }
        (machine / f"{commits[-1][:8]}-existing-py.json").write_text(json.dumps(result))
    run(sys.executable, "-m", "asv", "publish", "--no-pull")
    html, plugin = folder / "asv/html", offline()
    plugin.localise(html, libraries())
    trials = folder / "asv/trials"
    trials.mkdir()
    entry = {
        "benchmark": BENCHMARK,
        "params": [],
        "commit": commits[0],
        "run": "7f3a" * 8,
        "store": "trials.db",
        "fingerprints": ["56ca46e673"],
    }
    (trials / "first.jsonl").write_text(json.dumps(entry) + "\n")
    efforts = {commits[1]: {BENCHMARK: {"effort": "quick", "seconds": 1.0}}}
    (html.parent / "efforts.json").write_text(json.dumps(efforts))
    plugin.embed(html)
    return html


if __name__ == "__main__":
    print(libraries())
