"""The cluster key on disk over a join and a leave, and the rules by which a node is fresh."""

from pathlib import Path

import pytest

from exo_node.node.trust.certificates import cluster_fingerprint
from exo_node.node.trust.cluster_key import FRESH_FILE, KeyFolder
from exo_node.node.trust.keys import ClusterKey
from exo_node.placement.errors import InvalidSettings

OTHER = ClusterKey(b"\x07" * 20)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def fresh(folder: KeyFolder) -> bool:
    return folder.is_fresh(cluster_fingerprint(folder.load()))


def test_a_first_start_founds_a_cluster_and_is_fresh_until_it_has_company(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "d")
    key = folder.load()
    assert fresh(folder) and fresh(KeyFolder(tmp_path / "d"))
    assert folder.load() == key
    folder.establish()
    assert not fresh(folder)
    assert folder.load() == key


def test_a_key_that_was_put_there_is_not_fresh(tmp_path: Path) -> None:
    _ = (tmp_path / "cluster.key").write_text(OTHER.text)
    assert KeyFolder(tmp_path).load() == OTHER
    assert not fresh(KeyFolder(tmp_path))


def test_a_key_that_was_put_over_a_fresh_one_is_not_fresh(tmp_path: Path) -> None:
    _ = KeyFolder(tmp_path).load()
    _ = (tmp_path / "cluster.key").write_text(OTHER.text)
    assert not fresh(KeyFolder(tmp_path))


@pytest.mark.parametrize("mark", ["", "{", "[]", '"x"', "{}", '{"cluster": 5, "left": 7}'])
def test_a_damaged_mark_means_established(tmp_path: Path, mark: str) -> None:
    folder = KeyFolder(tmp_path)
    _ = folder.load()
    _ = (tmp_path / FRESH_FILE).write_text(mark)
    assert not fresh(folder)
    assert folder.left_clusters() == frozenset()


def test_taking_a_key_backs_up_the_old_one_privately(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    old = folder.load()
    backup = folder.take(OTHER)
    assert backup is not None and backup.read_text().strip() == old.text
    assert backup.name == f"cluster.key.{cluster_fingerprint(old)}"
    assert folder.load() == OTHER and not fresh(folder)
    assert mode(backup) == mode(tmp_path / "cluster.key") == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.key", backup.name]
    assert folder.take(OTHER) is None


def test_a_full_disk_leaves_the_old_key_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = KeyFolder(tmp_path)
    old = folder.load()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InvalidSettings, match="No space left"):
        _ = folder.take(OTHER)
    with pytest.raises(InvalidSettings, match="No space left"):
        _ = folder.leave()
    monkeypatch.undo()
    assert folder.load() == old and fresh(folder)
    assert {path.name for path in tmp_path.iterdir()} == {FRESH_FILE, "cluster.key"}


def test_leaving_founds_another_cluster_that_does_not_ask_the_old_one(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    _ = folder.take(OTHER)
    backup = folder.leave()
    assert backup.read_text().strip() == OTHER.text
    assert folder.load() != OTHER and fresh(folder)
    assert folder.left_clusters() == {cluster_fingerprint(OTHER)}
    assert mode(tmp_path / "cluster.key") == 0o600


@pytest.mark.parametrize("source", ["variable", "file"])
def test_a_key_from_outside_is_neither_fresh_nor_changed(tmp_path: Path, source: str) -> None:
    file = tmp_path / "key"
    _ = file.write_text(OTHER.text)
    data = tmp_path / "d"
    folder = (
        KeyFolder(data, variable=OTHER.text)
        if source == "variable"
        else KeyFolder(data, key_file=file)
    )
    assert folder.load() == OTHER and not fresh(folder)
    origin = "EXO_CLUSTER_KEY" if source == "variable" else "--cluster-key-file"
    for change in (lambda: folder.take(OTHER), folder.leave):
        with pytest.raises(InvalidSettings, match=origin):
            _ = change()
    assert not data.exists()
