"""A user's object that does not exist is refused by its file's syntax tree, without an import.

Each refusal is one line: the option, the name, what is wrong, and the remedy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.records import objects
from dpbench.records.errors import UnknownName
from dpbench.records.spelling import dashed

CODE = """
import torch
from torch import nn

raise AssertionError("imported")


class Net(nn.Module):
    pass


class UNet:
    def build(self, size):
        inner = Net()
        return inner


class Static:
    @staticmethod
    def build(size):
        return Net()


def make():
    return UNet()


net, other = UNet(), UNet()
_private = 3
"""
NAMES = "net, other, Net, UNet, Static, make"
"""Its public names: objects, then classes and functions."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unet.py").write_text(CODE)
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "inner" / "nets.py").write_text(CODE)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("net = None\n")
    (tmp_path / "whole" / "part.py").write_text("")
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    return name\n")
    (tmp_path / "starred.py").write_text("from unet import *\n")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "unet.py:net",
        "unet.py:other",
        "./unet.py:net",
        "package/../unet.py:net",
        "unet.py:Static",
        "unet:net",
        "unet:net.attribute",
        "package.inner.nets:net",
        "whole:net",
        "whole:part",
        "lazy.py:anything",
        "lazy:anything",
        "starred.py:net",
        "torch.nn.functional:relu",
    ],
)
def test_an_object_that_may_exist_is_accepted(name: str) -> None:
    objects.check(name, "models")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nofile.py:NET", "there is no file nofile.py in the folder {here}; correct the path"),
        ("unit.py:net", "there is no file unit.py in the folder {here}; did you mean 'unet'?"),
        (
            "unet.py:nett",
            "unet.py has {names}, but no nett; did you mean 'net'?",
        ),
        (
            "unet:nothing",
            "unet has {names}, but no nothing; correct the name after",
        ),
        (
            "package.inner.nets:nothing",
            "package.inner.nets has {names}, but no nothing",
        ),
        ("package.inner.net:net", "the package package.inner has no module net; correct the name"),
        ("unet.py:UNet", "UNet is a class, and dpbench needs an object with build, batch and loss"),
        ("nowhere:net", "cannot find the module 'nowhere' in the folder {here} or on Python's"),
    ],
)
def test_an_object_that_does_not_exist_is_refused(name: str, told: str, here: Path) -> None:
    with pytest.raises(UnknownName) as caught:
        objects.check(name, "models")
    assert (caught.value.option, caught.value.value) == ("models", name)
    assert "\n" not in str(caught.value)
    expected = told.format(here=here, names=NAMES)
    assert caught.value.told(dashed).startswith(f"--models {name}: {expected}")


@pytest.mark.parametrize("name", ["unet.py", "unet.py:", ":net", "package..nets:net", "unet"])
def test_a_name_without_a_part_is_told_the_form(name: str) -> None:
    like = ", such as unet.py:name" if name == "unet.py" else ""
    with pytest.raises(UnknownName) as caught:
        objects.check(name, "dataset")
    assert caught.value.told(dashed) == (
        f"--dataset {name}: give file.py:name or package.module:name{like}"
    )
