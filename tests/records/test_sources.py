"""The digest of a user's files: it changes with what an object imports, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpbench.records import Case
from dpbench.records.sources import digest, names_of

FILES = {
    "net.py": "import layers\nfrom .blocks import block\nfrom pack.deep import thing\nnet = 1\n",
    "layers.py": "import widths\n",
    "widths.py": "WIDTH = 4\n",
    "blocks.py": "import net\nblock = 2\n",
    "pack/__init__.py": "",
    "pack/deep.py": "import torch\nthing = 3\n",
    "train.py": "import net\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_names_of_a_users_objects_are_those_of_models_and_strategies():
    alone = Case(model="net.py:net", strategy="single", batch_size=4)
    assert names_of([alone, replace(alone, model="mlp")]) == {"net.py:net"}
    own = replace(alone, model="mlp", strategy="train.py:loop")
    assert names_of([alone, own]) == {"net.py:net", "train.py:loop"}


@pytest.mark.parametrize("name", ["net.py:net", "net:net"])
@pytest.mark.parametrize("changed", sorted(FILES))
def test_a_change_of_a_file_that_an_object_imports_changes_the_digest(folder, name, changed):
    before = digest([name])
    assert before == digest([name])
    (folder / changed).write_text(FILES[changed] + "# changed\n")
    assert (digest([name]) == before) == (changed == "train.py")


def test_a_file_elsewhere_imports_its_own_neighbours(folder, monkeypatch):
    monkeypatch.chdir("/")
    before = digest([f"{folder}/net.py:net"])
    (folder / "widths.py").write_text("WIDTH = 8\n")
    assert digest([f"{folder}/net.py:net"]) != before


@pytest.mark.parametrize("name", ["mlp", "torchvision:resnet18", "absent.py:net", "absent.net:net"])
def test_names_of_installed_or_absent_modules_have_none(name):
    assert digest([name]) == ""


def test_a_file_that_does_not_parse_still_counts(folder):
    before = digest(["net.py:net"])
    (folder / "net.py").write_text("net = (\n")
    assert digest(["net.py:net"]) not in ("", before)
