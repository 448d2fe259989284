"""Action steps: run the steps of action.yml in bash, as a workflow does, without a workflow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def run(folder: Path, outside: Path, job: str = "", **inputs: str) -> list[int]:
    """Run the steps in a checkout, without the installation; return the codes up to a failure.

    `job` is the name of the workflow's job.
    `outside` is a folder for what a runner has. It gets the outputs and the summary under the names
    of their variables, and in `calls` what would have been said to `gh`; a file `ids` in it has the
    comments that `gh` lists.
    """
    told = yaml.safe_load((ROOT / "action.yml").read_text())
    given = {name: str(one.get("default", "")) for name, one in told["inputs"].items()} | inputs
    programs = outside / "programs"
    programs.mkdir(exist_ok=True)
    fakes = {
        "dpbench": f'exec "{sys.executable}" -m dpbench "$@"\n',
        "gh": f'echo "$@" >> "{outside}/calls"\n'
        f'case "$*" in *--paginate*) cat "{outside}/ids";; esac\n',
    }
    for name, body in fakes.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}")
        (programs / name).chmod(0o755)
    (outside / "ids").touch()
    written = {name: outside / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for path in written.values():
        path.write_text("")
    codes = []
    for step in told["runs"]["steps"]:
        if step["name"] == "Set up":
            continue
        outputs = dict(
            line.partition("=")[::2] for line in written["GITHUB_OUTPUT"].read_text().splitlines()
        )
        known = {f"inputs.{name}": value for name, value in given.items()}
        known["github.job"] = job
        known |= {f"steps.gate.outputs.{name}": value for name, value in outputs.items()}
        own = {name: filled(value, known) for name, value in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RUNNER_TEMP": str(outside),
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                **{name: str(path) for name, path in written.items()},
                **own,
            },
            timeout=600,
            check=False,
        )
        codes.append(done.returncode)
        if done.returncode:
            break
    return codes


def filled(text: str, known: Mapping[str, str]) -> str:
    """Return a text of action.yml with its expressions replaced; unknown ones become empty."""
    parts = text.split("${{")
    return parts[0] + "".join(
        known.get(part.partition("}}")[0].strip(), "") + part.partition("}}")[2]
        for part in parts[1:]
    )
