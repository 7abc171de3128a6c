import pytest

from spmd_rl.files.atomic_folder import written_aside


def test_a_folder_appears_when_it_is_complete(tmp_path):
    folder = tmp_path / "models" / "tiny"
    with written_aside(folder) as aside:
        (aside / "config.json").write_text("{}")
        assert not folder.exists()
    assert [p.name for p in folder.iterdir()] == ["config.json"]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), written_aside(tmp_path / "tiny") as aside:
        (aside / "config.json").write_text("{}")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("old")
    with pytest.raises(OSError, match="tiny"), written_aside(tmp_path / "tiny"):
        pass
    assert (tmp_path / "tiny" / "config.json").read_text() == "old"


def test_a_folder_that_is_replaced_stays_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "old.json").write_text("{}")
    with written_aside(tmp_path / "tiny", replace=True) as aside:
        (aside / "new.json").write_text("{}")
        assert [p.name for p in (tmp_path / "tiny").iterdir()] == ["old.json"]
    assert [p.name for p in (tmp_path / "tiny").iterdir()] == ["new.json"]
