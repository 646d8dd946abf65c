"""Each node fetches only the files its own processes read, for any number of writers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import save_file

from recipes.checkpoints.commit import find_corruption, read_content_digest
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import (
    PART_KEY,
    PLACES_KEY,
    AllWeights,
    CheckpointPart,
    NodeShard,
    SafetensorsHeader,
    TensorRows,
    part_in_folder,
    read_safetensors_header,
    shard_rows,
)
from recipes.runner import Restart
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import FileRecord, Manifest
from recipes.training.checkpointing.sharded_safetensors import ShardedTensors
from tests.support.s3_server import VARIABLES, S3Server

URI = "s3://hanzo-ml/checkpoints/run-1"
SIZES = {"large": 64, "uneven": 13, "small": 3, "one": 1}


def name_of(stem: str, rank: int, processes: int) -> str:
    return f"{stem}-rows-{rank + 1:05}-of-{processes:05}.safetensors"


def whole_of(stem: str, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    return {f"{stem}/{name}": torch.arange(2.0 * rows).view(rows, 2) + rows for name, rows in sizes.items()}


def write(folder: Path, ranks: Iterable[int], processes: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write files as FSDP processes do: each its own rows, plus a replicated scalar."""
    for stem in ("model", "optimizer"):
        whole = whole_of(stem, sizes)
        for rank in ranks:
            own = {name: shard_rows(len(tensor), rank, processes) for name, tensor in whole.items()}
            held = {name: tensor[own[name].start : own[name].stop].clone() for name, tensor in whole.items()}
            metadata = {PLACES_KEY: json.dumps({name: [rows.start, len(whole[name])] for name, rows in own.items()})}
            save_file({**held, "step": torch.tensor(7.0)}, folder / name_of(stem, rank, processes), metadata)


def headers_in(folder: Path, paths: Sequence[str]) -> list[SafetensorsHeader]:
    return [header_in(folder / path) for path in paths]


def header_in(file: Path) -> SafetensorsHeader:
    data = file.read_bytes()
    return read_safetensors_header(lambda start, stop: data[start:stop])


def manifest_of(folder: Path) -> Manifest:
    files = tuple(FileRecord(path=file.name, sha256="", size=0) for file in sorted(folder.iterdir()))
    return Manifest(kind="checkpoint", files=files)


@given(
    writers=st.integers(1, 6),
    machines=st.integers(1, 4),
    processes_per_node=st.integers(1, 3),
    sizes=st.dictionaries(st.sampled_from("abc"), st.integers(1, 20), min_size=1),
)
def test_share_holds_all_rows_of_the_processes_of_its_machine(
    writers: int, machines: int, processes_per_node: int, sizes: dict[str, int]
) -> None:
    with TemporaryDirectory() as at:
        folder = Path(at)
        write(folder, range(writers), writers, sizes)
        (folder / "trainer_state.json").write_text("{}")
        everybody = set()
        for number in range(1, machines + 1):
            share = NodeShard(number, machines, processes_per_node)
            files = share.files(manifest_of(folder), lambda paths: headers_in(folder, paths))
            assert "trainer_state.json" in files
            for stem in ("model", "optimizer"):
                here = ShardedTensors(sorted(folder / name for name in files if name.startswith(stem)))
                assert here.read("step") == 7.0
                for name, tensor in whole_of(stem, sizes).items():
                    assert here.shape(name) == tensor.shape
                    for rank in share.ranks:
                        own = shard_rows(len(tensor), rank, machines * processes_per_node)
                        assert here.read(name, own).equal(tensor[own.start : own.stop])
            everybody |= files
        useful = {
            name_of(stem, rank, writers)
            for stem in ("model", "optimizer")
            for rank in range(writers)
            if any(shard_rows(rows, rank, writers) for rows in sizes.values())
        }
        assert useful <= everybody, "together they have all"


def test_share_is_own_files_with_unchanged_process_count(tmp_path: Path) -> None:
    write(tmp_path, range(8), 8, {"large": 64})
    for number in range(1, 5):
        share = NodeShard(number, 4, 2)
        assert share.files(manifest_of(tmp_path), lambda paths: headers_in(tmp_path, paths)) == {
            name_of(stem, rank, 8) for stem in ("model", "optimizer") for rank in (2 * number - 2, 2 * number - 1)
        }


@pytest.mark.requirement("I10")
def test_three_machines_fetch_only_their_share_of_four(tmp_path: Path) -> None:
    """From 32 to 24 processes: each machine fetches 11 or 12 files, not 32."""
    write(tmp_path, range(32), 32, {"large": 96 * 32})
    counts = []
    for number in (1, 2, 3):
        files = NodeShard(number, 3, 8).files(manifest_of(tmp_path), lambda paths: headers_in(tmp_path, paths))
        counts.append(sum(name.startswith("model") for name in files))
    assert counts == [11, 12, 11]


def test_files_without_row_metadata_are_all_fetched(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / name_of("model", 0, 2))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / name_of("model", 1, 2))
    assert len(NodeShard(1, 2, 1).files(manifest_of(tmp_path), lambda paths: headers_in(tmp_path, paths))) == 2


def test_scalar_named_alike_in_model_and_optimizer_is_fetched_from_both(tmp_path: Path) -> None:
    """For an optimizer that holds only this scalar, one file is enough."""
    for rank in range(3):
        places = {PLACES_KEY: json.dumps({"weight": [4 * rank, 12]})}
        save_file({"weight": torch.zeros(4), "step": torch.tensor(7.0)}, tmp_path / name_of("model", rank, 3), places)
        save_file({"step": torch.tensor(9.0)}, tmp_path / name_of("optimizer", rank, 3))
    for number in (1, 2, 3):
        files = NodeShard(number, 3, 1).files(manifest_of(tmp_path), lambda paths: headers_in(tmp_path, paths))
        assert files == {name_of("model", number - 1, 3), name_of("optimizer", 0, 3)}


def test_reading_rows_absent_from_local_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [1], 2, {"large": 64})
    files = ShardedTensors([tmp_path / name_of("model", 1, 2)])
    assert files.shape("model/large") == (64, 2)
    assert len(files.read("model/large", range(32, 64))) == 32
    for rows in (range(31, 33), range(32), None):
        with pytest.raises(ValueError, match="are not all in these files"):
            files.read("model/large", rows)
    with pytest.raises(ValueError, match="32 of 64 rows"):
        list(files.iter_pieces("model/large"))


@pytest.fixture
def store(s3: S3Server) -> Store:
    return Store(s3.address, VARIABLES)


def machine(store: Store, tmp_path: Path, name: str, number: int, of: int = 2) -> CheckpointManager:
    return CheckpointManager(tmp_path / name, store, URI, 3, share=NodeShard(number, of, 1))


def save(together: Sequence[CheckpointManager], step: int) -> None:
    for number, checkpoints in enumerate(together, 1):
        part = CheckpointPart(number=number, of=len(together), save=f"save-{step}")
        with checkpoints.save(step, {PART_KEY: part.model_dump(mode="json")}) as folder:
            write(folder, [number - 1], len(together))
            if number == 1:
                (folder / "trainer_state.json").write_text("{}")
        checkpoints.wait()


def fetched(s3: S3Server) -> set[str]:
    """Return files downloaded completely; of the others only the header was read."""
    asked = [(each.path.rpartition("/")[2], each.headers.get("range", "")) for each in s3.requests if each.method == "GET"]
    return {name for name, asked_for in asked if asked_for.startswith("bytes=0-") and asked_for != "bytes=0-7"}


def files_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {"manifest.json"}


def of_rank(rank: int) -> set[str]:
    return {name_of("model", rank, 2), name_of("optimizer", rank, 2)}


@pytest.fixture
def together(store: Store, tmp_path: Path) -> list[CheckpointManager]:
    made = [machine(store, tmp_path, "first", 1), machine(store, tmp_path, "second", 2)]
    save(made, 6)
    return made


def test_a_new_machine_fetches_its_share_alone(
    together: list[CheckpointManager], store: Store, s3: S3Server, tmp_path: Path
) -> None:
    s3.requests.clear()
    new = machine(store, tmp_path, "new", 2)
    found = new.latest()
    assert found and found[0] == 6 and find_corruption(found[1], 6) is None
    assert files_in(found[1]) == {"trainer_state.json", *of_rank(1)}
    assert fetched(s3).isdisjoint(of_rank(0))


def test_machine_with_its_folder_fetches_only_shared_files(together: list[CheckpointManager], s3: S3Server) -> None:
    s3.requests.clear()
    found = together[1].latest()
    assert found and files_in(found[1]) == {"trainer_state.json", *of_rank(1)}
    assert fetched(s3) == {"manifest.json", "trainer_state.json"}


def test_shares_of_one_checkpoint_have_equal_content_digests(together: list[CheckpointManager], s3: S3Server) -> None:
    first, second = (checkpoints.latest() for checkpoints in together)
    assert first and second and read_content_digest(first[1]) == read_content_digest(second[1])
    s3.requests.clear()
    together[1].ensure_local(6, read_content_digest(first[1]))
    assert fetched(s3) <= {"manifest.json"}


def test_share_is_never_uploaded_as_a_complete_checkpoint(together: list[CheckpointManager], store: Store) -> None:
    """The checkpoint was deleted in the store."""
    found = together[1].latest()
    assert found and part_in_folder(found[1])
    store.delete(f"{URI}/6")
    together[1].upload_missing()
    together[1].wait()
    assert together[1].stored_steps() == []


def test_local_share_of_another_machine_is_replaced_by_own(together: list[CheckpointManager], tmp_path: Path) -> None:
    """The machine had another node number, and therefore other rows."""
    (tmp_path / "second" / "6").rename(tmp_path / "second" / "of-the-second")
    (tmp_path / "first" / "6").rename(tmp_path / "second" / "6")
    found = together[1].latest()
    assert found and files_in(found[1]) == {"trainer_state.json", *of_rank(1)}


def test_publishing_fetches_all_weights_but_no_optimizer(
    together: list[CheckpointManager], store: Store, tmp_path: Path
) -> None:
    new = machine(store, tmp_path, "new", 1)
    found = new.latest()
    assert found
    new.branch("from-6", 6).fetch_all_weights(found)
    assert files_in(found[1]) == {"trainer_state.json", name_of("model", 0, 2), name_of("model", 1, 2)}
    rows = ShardedTensors(sorted(found[1].glob("model*")))
    assert {name: rows.read(name).tolist() for name in whole_of("model", SIZES)} == {
        name: tensor.tolist() for name, tensor in whole_of("model", SIZES).items()
    }


def test_fetched_weights_are_not_combined_with_share_of_another_machine(
    together: list[CheckpointManager], store: Store, tmp_path: Path
) -> None:
    """The combination would lack the first machine's part of the optimizer."""
    first, second = machine(store, tmp_path, "new", 1), together[1]
    found = first.latest()
    assert found and second.latest()
    first.fetch_all_weights(found)
    store.delete(f"{URI}/6")
    for checkpoints in (second, first):
        checkpoints.stored.send(6)
    assert first.stored_steps() == []


def test_publishing_incomplete_weights_is_refused(together: list[CheckpointManager], store: Store) -> None:
    found = together[0].latest()
    store.delete(f"{URI}/6")
    assert found
    with pytest.raises(Restart, match="not all of its weights are on this machine"):
        together[0].fetch_all_weights(found)


def beginning(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("garbage", [b"", b"1234567", beginning(b"[]"), beginning(b'{"model/one":{}}'), b"\xff" * 20])
def test_files_corrupt_in_the_store_are_detected(
    together: list[CheckpointManager], store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], garbage: bytes
) -> None:
    store.put_bytes(f"{URI}/6/{name_of('model', 0, 2)}", garbage)
    assert machine(store, tmp_path, "new", 2).latest() is None
    assert "uploaded checkpoint 6 is broken" in capsys.readouterr().out


def test_corrupt_header_length_does_not_read_the_whole_file() -> None:
    """Regression: a header length from corrupt bytes loaded a file of 100 GB into memory."""
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return b"\xff" * 8

    with pytest.raises(ValidationError):
        read_safetensors_header(read)
    assert [start for start, _ in asked] == [0, 8] and asked[1][1] < 1 << 28


def test_two_machines_resume_from_checkpoint_of_one(store: Store, tmp_path: Path) -> None:
    save([CheckpointManager(tmp_path / "alone", store, URI, 3)], 6)
    for number in (1, 2):
        found = machine(store, tmp_path, f"machine-{number}", number).latest()
        assert found and "trainer_state.json" in files_in(found[1])
        rows = ShardedTensors(sorted(found[1].glob("model*")))
        assert len(rows.read("model/large", shard_rows(64, number - 1, 2))) == 32


def test_weight_selection_excludes_optimizer_files(tmp_path: Path) -> None:
    write(tmp_path, [0, 1], 2)
    assert AllWeights(1, 2, 1).files(manifest_of(tmp_path), lambda paths: headers_in(tmp_path, paths)) == {
        name_of("model", 0, 2),
        name_of("model", 1, 2),
    }


class Faulty(NodeShard):
    def needs_rows(self, part: TensorRows) -> bool:
        raise KeyError(part.path)


def test_programming_error_in_share_selection_is_raised(
    together: list[CheckpointManager], store: Store, tmp_path: Path
) -> None:
    """Regression: it counted as an unreadable header, and each machine fetched all files."""
    with pytest.raises(KeyError):
        CheckpointManager(tmp_path / "new", store, URI, 3, share=Faulty(2, 2, 1)).latest()
