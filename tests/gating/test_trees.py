"""Trees: the copies have the code of their side, leave the checkout alone, and are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.gating import trees as trees_module
from dpbench.gating.trees import copies
from dpbench.records.errors import UsageError
from tests.gating.projects import commit, git, project


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def test_each_copy_has_the_code_of_its_side(repository: Path) -> None:
    commit(repository, {"kept.py": "1", "gone.py": "1", "both.py": "new"})
    (repository / "kept.py").write_text("2")
    (repository / "gone.py").unlink()
    (repository / "fresh.py").write_text("3")
    with copies("base", repository) as trees:
        base, head = trees.both
        assert not (base.folder / "kept.py").exists()
        assert not (base.folder / "fresh.py").exists()
        assert (head.folder / "kept.py").read_text() == "2"
        assert (head.folder / "both.py").read_text() == "new"
        assert (head.folder / "fresh.py").read_text() == "3"
        assert not (head.folder / "gone.py").exists()
        assert {*trees.differing} == {"kept.py", "gone.py", "fresh.py", "both.py"}


def test_ignored_files_are_in_no_copy_unless_they_are_linked(repository: Path) -> None:
    for name in ("data", "checkpoints"):
        (repository / name / "raw").mkdir(parents=True)
        (repository / name / "raw" / "file").write_text("kept")
    (repository / ".gitignore").write_text("data/\ncheckpoints/\n")
    with copies("base", repository, ["data"]) as trees:
        for tree in trees.both:
            assert (tree.folder / "data" / "raw" / "file").read_text() == "kept"
            assert not (tree.folder / "checkpoints").exists()
            (tree.folder / "checkpoints").mkdir()
            (tree.folder / "checkpoints" / "last").write_text("of a copy")
            assert "checkpoints" in tree.lacks()
            assert "data" not in tree.lacks()
    assert (repository / "data" / "raw" / "file").read_text() == "kept"
    assert {*(repository / "checkpoints").rglob("*")} == {
        repository / "checkpoints" / "raw",
        repository / "checkpoints" / "raw" / "file",
    }


@pytest.mark.parametrize("path", ["nowhere", "..", ".", "/"])
def test_only_a_path_of_the_checkout_is_linked(repository: Path, path: str) -> None:
    with pytest.raises(UsageError, match="names no file"), copies("base", repository, [path]):
        pass


def test_a_renamed_file_is_not_in_the_copy(repository: Path) -> None:
    git(repository, "mv", "train.py", "trainer.py")
    with copies("base", repository) as trees:
        assert not (trees.head.folder / "train.py").exists()
        assert (trees.head.folder / "trainer.py").exists()


def test_a_file_takes_the_place_of_a_folder_and_of_a_link(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("mine")
    commit(repository, {"part/one.py": "1", "whole.py": "1"})
    (repository / "out").symlink_to(outside)
    commit(repository, {}, tag="linked")
    (repository / "part" / "one.py").unlink()
    (repository / "part").rmdir()
    (repository / "part").write_text("a file")
    (repository / "whole.py").unlink()
    (repository / "whole.py").mkdir()
    (repository / "whole.py" / "two.py").write_text("2")
    (repository / "out").unlink()
    (repository / "out").mkdir()
    (repository / "out" / "x").write_text("new")
    with copies("linked", repository) as trees:
        head = trees.head.folder
        assert (head / "part").read_text() == "a file"
        assert (head / "whole.py" / "two.py").read_text() == "2"
        assert (head / "out" / "x").read_text() == "new"
    assert (outside / "x").read_text() == "mine"


def test_other_worktrees_keep_their_state(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", str(tmp_path / "other"))
    (tmp_path / "other").rename(tmp_path / "away")  # as on a drive that is not mounted
    with copies("base", repository):
        pass
    (tmp_path / "away").rename(tmp_path / "other")
    assert git(tmp_path / "other", "status", "--porcelain") == ""


def test_a_commit_that_cannot_be_checked_out_leaves_nothing(repository: Path) -> None:
    commit(repository, {".gitattributes": "*.bin filter=bad\n", "a.bin": "1"}, tag="filtered")
    git(repository, "config", "filter.bad.clean", "cat")
    git(repository, "config", "filter.bad.smudge", "false")
    git(repository, "config", "filter.bad.required", "true")
    with pytest.raises(OSError, match="git worktree failed"), copies("filtered", repository):
        pass
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_notes_say_if_the_step_ran_none_of_the_changes(repository: Path) -> None:
    with copies("base", repository) as trees:
        assert len(trees.notes([])) == 1
    (repository / "model.py").write_text("2")
    with copies("base", repository) as trees:
        assert trees.notes([str(trees.head.folder / "model.py")]) == []
        (note,) = trees.notes([str(trees.head.folder / "train.py")])
        assert "model.py" in note


def test_much_data_is_not_copied(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees_module, "MOST_BYTES", 100)
    (repository / "huge.bin").write_bytes(bytes(200))
    with pytest.raises(UsageError, match=r"huge\.bin"), copies("base", repository):
        pass


def test_nothing_is_left_and_nothing_changes(repository: Path) -> None:
    commit(repository, {"staged.py": "1"})
    (repository / "staged.py").write_text("2")
    git(repository, "add", "staged.py")
    (repository / "model.py").write_text("3")
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    folders: list[Path] = []

    def fail() -> None:
        with copies("base", repository) as trees:
            folders.extend(tree.folder for tree in trees.both)
            assert all(folder.is_dir() for folder in folders)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(folder.exists() for folder in folders)
    assert before == (git(repository, "status", "--porcelain"), git(repository, "worktree", "list"))


def test_a_folder_of_the_project_stays_the_working_folder(repository: Path) -> None:
    commit(repository, {"models/net.py": "1"}, tag="later")
    with copies("later", repository / "models") as trees:
        assert trees.base.working == trees.base.folder / "models"
    missing = pytest.raises(UsageError, match="models does not exist")
    with missing, copies("base", repository / "models"):
        pass


def test_a_file_of_the_checkout_is_no_file_of_a_copy(repository: Path) -> None:
    (repository / "data").mkdir()
    (repository / "data" / "sets.py").write_text("1")
    commit(repository, {"data_loading.py": "1"}, tag="later")
    with copies("later", repository, ["data"]) as trees:
        base = trees.base
        base.check([str(base.folder / "model.py"), str(repository / "data" / "sets.py"), __file__])
        for name in ("model.py", "data_loading.py"):
            with pytest.raises(UsageError, match=name):
                base.check([str(repository / name)])


def test_an_installed_copy_of_a_changed_file_is_no_file_of_a_copy(repository: Path) -> None:
    changed = {"libs/core/src/core/x.py": "1", "model.py": "2", "six.py": "3"}
    inner = {"src/lib/backends/__init__.py": "", "src/lib/backends/torch/__init__.py": "4"}
    commit(repository, changed | inner)
    installed = "/usr/lib/python3/site-packages"
    with copies("base", repository) as trees:
        for tree in trees.both:
            # one module of a name is no evidence of a package
            tree.check([f"{installed}/core/y.py", f"{installed}/six.py", f"{installed}/a/model.py"])
            tree.check([f"{installed}/torch/__init__.py"])
            with pytest.raises(UsageError, match="an installed copy of libs/core"):
                tree.check([f"{installed}/core/x.py"])


def test_a_base_with_further_commits_is_told(repository: Path) -> None:
    commit(repository, {"later.py": "1"}, tag="later")
    with copies("base", repository) as trees:
        assert not trees.remarks
    git(repository, "checkout", "base")
    with copies("later", repository) as trees:
        (remark,) = trees.remarks
    assert "git merge-base later HEAD" in remark


def test_compiled_modules_that_git_does_not_track_are_told(repository: Path) -> None:
    (repository / ".gitignore").write_text("_ignored.so\n")
    for name in ("_fast.so", "_ignored.so"):
        (repository / name).write_text("")
    with copies("base", repository) as trees:
        assert [name in remark for remark in trees.remarks for name in ("_fast", "_ignored")] == [
            *(True, False),
            *(False, True),
        ]
    with copies("base", repository, ["_ignored.so"]) as trees:
        assert len(trees.remarks) == 1


def test_an_untracked_path_is_linked_and_not_copied(repository: Path) -> None:
    (repository / "sets").mkdir()
    (repository / "sets" / "file").write_text("1")
    with copies("base", repository, ["sets"]) as trees:
        assert all((tree.folder / "sets").is_symlink() for tree in trees.both)


def test_a_path_with_tracked_files_is_not_linked(repository: Path) -> None:
    commit(repository, {"kept/.gitkeep": ""})
    with (
        pytest.raises(UsageError, match="has files that git tracks"),
        copies("base", repository, ["kept"]),
    ):
        pass


def test_no_checkout_and_no_commit_are_errors(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no commit 'nowhere'"), copies("nowhere", repository):
        pass
    with pytest.raises(UsageError, match="in no git checkout"), copies("base", tmp_path):
        pass
    shallow = tmp_path / "shallow"
    commit(repository, {"more.py": "1"})
    git(tmp_path, "clone", "--depth", "1", repository.as_uri(), str(shallow))
    with pytest.raises(UsageError, match="--unshallow"), copies("HEAD~1", shallow):
        pass


def test_an_option_is_no_commit(repository: Path) -> None:
    with pytest.raises(UsageError, match="no commit '--help'"), copies("--help", repository):
        pass


def test_a_submodule_must_have_the_same_commit(repository: Path, tmp_path: Path) -> None:
    part = project(tmp_path / "part")
    git(repository, "submodule", "add", str(part), "part")
    commit(repository, {}, tag="with-part")
    with copies("with-part", repository) as trees:
        for tree in trees.both:
            module = tree.folder / "part" / "model.py"
            assert module.exists()
            tree.check([str(module.resolve())])
    (repository / "part" / "model.py").write_text("uncommitted")
    with pytest.raises(UsageError, match="the submodule part"), copies("with-part", repository):
        pass
    git(repository / "part", "checkout", "model.py")
    commit(part, {"model.py": "new"})
    git(repository / "part", "pull")
    with pytest.raises(UsageError, match="the submodule part"), copies("with-part", repository):
        pass
    commit(repository, {})
    with pytest.raises(UsageError, match="the submodule part"), copies("with-part", repository):
        pass
