"""States of HANZO_ML_CHECKPOINTS: the restored folder equals the saved one."""

import hashlib
import os
from pathlib import Path

import pytest

from recipes.command.multi_node_publisher import MultiNodePublisher
from recipes.command.nodes import restore_part
from recipes.contracts.job import StoreAddress
from recipes.contracts.results import UNSENT_METRICS_FILE, USAGE_FILE
from recipes.storage import object_names, signed_upload
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.folder_tree import resolve_link, write_tree
from recipes.storage.manifest import FileRecord, FolderRecord, LinkRecord
from resources.object_store.program_scope import EXIT_DOCUMENT
from tests.support.folder_contents import OLDEST, read_folder, write_folder
from tests.support.recipes.command_gang import gang, one_state, together
from tests.support.recipes.folder_snapshots import PLACE, publish, restore
from tests.support.recipes.observed_store import Watched


def local_store(folder: Path) -> Store:
    return Store(StoreAddress(root=folder.as_uri(), buckets={"checkpoints": "checkpoints"}))


@pytest.fixture(params=["folder", "like S3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    folder = tmp_path / "objects"
    return local_store(folder) if request.param == "folder" else Watched(folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return write_folder(tmp_path / "checkpoints")


def test_restored_folder_equals_the_saved_one(store: Store, saved: Path, tmp_path: Path) -> None:
    publish(saved, store)
    found = restore(store, tmp_path / "other")
    assert read_folder(found) == read_folder(saved)
    newest = max(found.glob("step-*"), key=lambda path: path.stat().st_mtime)
    assert newest.name == "step-100", "transformers rotates checkpoints by time"


def test_restored_folder_is_the_same_state(store: Store, saved: Path, tmp_path: Path) -> None:
    first = publish(saved, store)
    assert publish(restore(store, tmp_path / "other"), store) == first


def test_names_reserved_from_pods_match_those_of_the_server() -> None:
    assert object_names.COMMITTED_NAMES == (EXIT_DOCUMENT, USAGE_FILE, UNSENT_METRICS_FILE)
    assert object_names.MAX_COMMITTED_BYTES == signed_upload.COMMIT_BYTES


def test_nodes_get_modes_times_links_and_empty_folders_back(tmp_path: Path) -> None:
    store = Watched(tmp_path / "objects")
    nodes = gang(store, tmp_path)
    write_folder(nodes[0].folder)
    own = nodes[1].folder / "own"
    own.mkdir()
    (own / "manifest.json").write_text("second's")
    (own / "link").symlink_to("manifest.json")
    (own / "none").mkdir(mode=0o711)
    for path in (own / "manifest.json", own / "link", own / "none", own):
        os.utime(path, ns=(OLDEST, OLDEST + 5), follow_symlinks=False)
    first, second = read_folder(nodes[0].folder), read_folder(nodes[1].folder)
    one_state(nodes)
    state = nodes[0].states.newest()
    assert state is not None
    targets = [tmp_path / "back" / str(rank) / "checkpoints" for rank in range(2)]
    borrowed = [restore_part(store, state, rank, tmp_path / "cache", target) for rank, target in enumerate(targets)]
    assert [read_folder(target) for target in targets] == [{**first, **second}, {**first, **second}]

    def publish_again(rank: int) -> None:
        saving = nodes[rank].saving
        again = MultiNodePublisher(
            targets[rank], saving.states, saving.template, 0.0, lambda: None, nodes[rank].nodes, borrowed[rank]
        )
        again.publish()

    together(nodes, lambda node: publish_again(node.nodes.rank))
    again = nodes[0].states.newest()
    assert again is not None and store.manifest(again) == store.manifest(state), "what is others' is no part of a node's own"


def test_link_out_of_the_folder_is_stored_as_its_content(store: Store, tmp_path: Path) -> None:
    folder, outside = tmp_path / "checkpoints", tmp_path / "outside"
    folder.mkdir()
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "data").write_text("1")
    (outside / "newest").symlink_to("deep")
    (outside / "home").symlink_to(folder)
    (folder / "file").symlink_to(outside / "deep" / "data")
    (folder / "folder").symlink_to(outside)
    (folder / "inner").symlink_to(folder / "folder")
    publish(folder, store)
    found = read_folder(restore(store, tmp_path / "other"))
    content = {path: (entry[0], entry[-1]) for path, entry in found.items() if entry[0] != "folder"}
    assert content == {
        "file": ("file", b"1"),
        "folder/deep/data": ("file", b"1"),
        "folder/newest": ("link", "deep"),
        "folder/home": ("link", ".."),
        "inner": ("link", "folder"),
    }


def test_unstorable_entries_are_logged_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "kept").write_text("1")
    (folder / "all").symlink_to("/")
    (folder / "above").symlink_to("..")
    (folder / "gone").symlink_to("/nowhere/at/all")
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).write_text("no UTF-8")
    store = local_store(tmp_path / "objects")
    publish(folder, store)
    assert list(read_folder(restore(store, tmp_path / "other"))) == ["kept"]
    said = capsys.readouterr().out
    for name in ("all", "above", "gone", "pipe", "\\udcff"):
        assert any(f"{name} is not published" in line for line in said.splitlines()), (name, said)


def test_changed_times_make_no_new_state_but_are_restored(store: Store, saved: Path, tmp_path: Path) -> None:
    first = publish(saved, store)
    os.utime(saved / "step-200", ns=(OLDEST, OLDEST + 2 * 10**15))
    assert publish(saved, store) == first
    assert read_folder(restore(store, tmp_path / "other")) == read_folder(saved)


def test_plain_folder_manifest_is_unchanged_across_releases(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "step").mkdir(parents=True, mode=0o755)
    (folder / "step" / "a").write_text("1")
    made = publish(folder, local_store(tmp_path / "objects"))
    assert made is not None
    record = f'{{"path":"step/a","sha256":"{hashlib.sha256(b"1").hexdigest()}","size":1}}'
    document = f'{{"facts":{{}},"files":[{record}],"inputs":{{}},"kind":"checkpoints"}}'
    assert made.digest == hashlib.sha256(document.encode()).hexdigest()


def test_state_of_an_older_release_is_restored(tmp_path: Path) -> None:
    store = local_store(tmp_path / "objects")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("1")
    store.publish(tmp_path / "old", f"{PLACE}/state-7-0123456789ab", "checkpoints")
    assert {path: entry[-1] for path, entry in read_folder(restore(store, tmp_path / "other")).items()} == {"a": b"1"}


def test_deleting_a_state_deletes_its_times(saved: Path, tmp_path: Path) -> None:
    store = local_store(tmp_path / "objects")
    for text in "abc":
        (saved / "empty").write_text(text)
        publish(saved, store)
    states = {uri.split("/")[5] for uri in store.list(PLACE)}
    assert len(states) == 2
    assert {uri.split("/")[5] for uri in store.list(f"{PLACE}.index")} == states


def test_restore_overwrites_leftovers_of_a_killed_restore(saved: Path, tmp_path: Path) -> None:
    store = local_store(tmp_path / "objects")
    publish(saved, store)
    left = tmp_path / "other" / ".checkpoints.tmp" / "step-200"
    left.mkdir(parents=True)
    (left / "weights").write_text("half")
    left.chmod(0o555)
    assert read_folder(restore(store, tmp_path / "other")) == read_folder(saved)


@pytest.mark.parametrize(
    ("links", "path", "target"),
    [
        ({"a": "b"}, "a", "b"),
        ({"a/b": "../c"}, "a/b", "c"),
        ({"a": "b/../c"}, "a", "c"),
        ({"d": "sub/deep", "e": "d/../x"}, "e", "sub/x"),
        ({"a": "/etc"}, "a", None),
        ({"a": "../x"}, "a", None),
        ({"a/b/c": "../..", "z": "a/b/c/../x"}, "z", None),
        ({"a": "b", "b": "../x"}, "a", None),
        ({"a": "b", "b": "a"}, "a", "a"),
        ({"a": "."}, "a", ""),
    ],
)
def test_link_is_resolved_as_the_kernel_does(links: dict[str, str], path: str, target: str | None) -> None:
    assert resolve_link(path, links) == target


def test_stored_tree_never_writes_outside_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1")
    record = FileRecord(path="a/b", sha256="", size=1)

    def write(path: str, target: str) -> None:
        links = [LinkRecord(path=path, target=target)]
        write_tree(tmp_path / "target", {"a/b": record}, lambda path: tmp_path / "data", links=links)

    for path, target in (("a", "elsewhere"), ("a/../../x", "b"), ("l", "../.."), ("l", "/etc")):
        with pytest.raises(BrokenArtifact):
            write(path, target)
    with pytest.raises(BrokenArtifact):
        write_tree(tmp_path / "target", {}, lambda path: tmp_path, folders=[FolderRecord(path="../x")])
    assert not (tmp_path / "target").exists()
