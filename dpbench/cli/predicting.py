"""The commands about machines that are not here, and about this one as such a machine."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="A file that ends in .toml.  [default: stdout]")
def probe(output: Path | None) -> None:
    """Measure this machine in a minute, with nothing else running, and write it as a machine file for predictions."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: the figures are those of one thread
    from dpbench.probe import measure_toml

    text = measure_toml(lambda what: click.echo(f"measuring {what} ...", err=True))
    click.echo(text, nl=False) if output is None else output.write_text(text)
