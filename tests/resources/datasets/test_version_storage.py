"""Versions in the object store (folder or S3): cost of changes, deletion, crash safety."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select, update

from recipes.contracts.dataset_formats import Format
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.locations import chunk_folder, chunk_uri
from resources.datasets.deletion import delete_version
from resources.errors import HanzoError
from resources.ingest.new_version import NewVersion
from resources.ingest.source_files import local_files
from resources.ingest.version_creation import create_from_files
from resources.lineage.edges import record_artifact
from resources.lineage.proof import Prover
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.tables import artifacts, chunk_claims, dataset_holders, dataset_versions
from resources.object_store.chunk_claims import ChunkClaims
from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.postgres_server import until_one_waits
from tests.support.resources.stored_versions import ALL, CHUNKS, chunks, corpus, create, in_folder, store, stored
from tests.support.s3_server import VARIABLES, S3Request, S3Server

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url", "store"]
ROOT = Path(__file__).resolve().parents[3]


def content(store: Store, version: DatasetVersion) -> str:
    return b"".join(iterate_record_lines(store, version.artifact)).decode()


def count(database: Database, table: object) -> int:
    with database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_version_that_changes_one_percent_of_a_corpus_stores_little_more_than_that(
    sqlite_url: str, tmp_path: Path
) -> None:
    database, store = Database(sqlite_url), in_folder(tmp_path)
    lines = corpus(200_000_000)
    create(database, store, tmp_path, "".join(lines))
    before = stored(store)
    middle, part = len(lines) // 2, len(lines) // 100
    lines[middle : middle + part] = corpus(part * 900, seed=1)[:part]
    version, is_new = create(database, store, tmp_path, "".join(lines))
    assert is_new and version.version == 2
    assert stored(store) - before < 0.025 * before


RSS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.resources.stored_versions import in_folder
from resources.ingest.version_creation import create_version
from resources.metadata.database import Database
folder = Path(sys.argv[2])
database = Database(f"sqlite:///{folder}/metadata.db")
database.migrate()
def create(name):
    create_version(database, in_folder(folder), name=name, path=folder / f"{name}.jsonl", user="u", organization="default")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
first = create("small")
print(create("large") - first)
"""


@pytest.mark.requirement("B14")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    lines = "".join(corpus(12_000_000))
    (tmp_path / "small.jsonl").write_text(lines)
    (tmp_path / "large.jsonl").write_text(lines * 6)
    done = subprocess.run([sys.executable, "-c", RSS, str(ROOT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000_000


def test_stored_content_equals_the_input_and_chunks_are_named_by_hash(
    database: Database, store: Store, tmp_path: Path
) -> None:
    text = "".join(corpus(3_000_000))
    version, _ = create(database, store, tmp_path, text)
    assert [json.loads(line) for line in content(store, version).splitlines()] == list(map(json.loads, text.splitlines()))
    assert all(store.sha256(uri) == uri.rpartition("/")[2] for uri in chunks(store))
    folder = store.fetch(version.artifact, tmp_path / "cache")
    assert (folder / "records-00000.jsonl").read_text() == content(store, version)
    again = create(database, store, tmp_path, text)
    assert again == (version, False)


@pytest.mark.requirement("X1")
def test_every_object_on_s3_is_encrypted_and_known_chunks_are_not_sent_again(
    sqlite_url: str, s3: S3Server, tmp_path: Path
) -> None:
    def puts() -> list[S3Request]:
        return [request for request in s3.requests if request.method in ("PUT", "POST")]

    create(Database(sqlite_url), Store(s3.address, VARIABLES), tmp_path, "".join(corpus(3_000_000)))
    assert len([put for put in puts() if "/_chunks/" in put.path]) >= 2
    assert {put.headers.get("x-amz-server-side-encryption") for put in puts()} == {"AES256"}
    s3.requests.clear()
    create(Database(sqlite_url), Store(s3.address, VARIABLES), tmp_path, "".join(corpus(3_000_000)))
    assert not [put for put in puts() if "/_chunks/" in put.path], "what is there is not sent again"


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_broken_chunk_is_named_and_none_of_its_bytes_are_returned(
    database: Database, store: Store, tmp_path: Path, damage: str
) -> None:
    version, _ = create(database, store, tmp_path, "".join(corpus(3_000_000)))
    (file,) = store.manifest(version.artifact).files
    victim = chunk_uri(version.artifact.uri, file.chunks[1].sha256)
    if damage == "remove":
        store.remove(victim)
    else:
        data = store.get_bytes(victim)
        store.put_bytes(victim, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((BrokenArtifact, FileNotFoundError), match=file.chunks[1].sha256):
        content(store, version)
    with pytest.raises(BrokenArtifact, match=file.chunks[1].sha256):
        store.fetch(version.artifact, tmp_path / "cache")
    assert create(database, store, tmp_path, "".join(corpus(3_000_000))) == (version, False)
    assert store.sha256(victim) == file.chunks[1].sha256, "an upload of the same files repairs the chunk"


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_proof_names_only_the_broken_chunk(sqlite_url: str, tmp_path: Path, damage: str) -> None:
    database, store = Database(sqlite_url), in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, "".join(corpus(3_000_000)))

    def broken() -> list[str]:
        with database.read() as connection:
            prover = Prover(connection, store)
            prover.artifact(version.artifact, "run")
            return prover.broken

    assert broken() == []
    # The source contains spaces that the records do not: they share no chunk.
    (file,) = store.manifest(version.artifact).files
    victim = store.local_path(chunk_uri(version.artifact.uri, file.chunks[1].sha256))
    assert victim is not None
    data = victim.read_bytes()
    victim.unlink()
    if damage == "flip":
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (edge,) = broken()
    assert edge.startswith("run -> dataset version: ") and file.chunks[1].sha256 in edge
    victim.write_bytes(data)
    assert broken() == []


def test_deletion_removes_only_unshared_chunks_and_never_reuses_a_number(
    database: Database, store: Store, tmp_path: Path
) -> None:
    lines = corpus(4_000_000)
    first, _ = create(database, store, tmp_path, "".join(lines))
    only_first = chunks(store)
    second, _ = create(database, store, tmp_path, "".join(lines[len(lines) // 2 :]))
    shared = only_first & {
        chunk_uri(second.artifact.uri, chunk.sha256)
        for file in store.manifest(second.artifact).files
        for chunk in file.chunks
    }
    assert shared
    delete_version(database, store, second.id, "u")
    assert chunks(store) == only_first
    assert store.list(second.storage_path) == []
    assert content(store, first).count("\n") == len(lines)
    third, _ = create(database, store, tmp_path, "".join(lines[len(lines) // 2 :]))
    assert third.version == 3 and third.content_sha256 == second.content_sha256
    delete_version(database, store, first.id, "u")
    assert content(store, third).count("\n") == len(lines) - len(lines) // 2
    delete_version(database, store, third.id, "u")
    assert store.list(ALL) == []
    assert [count(database, table) for table in (artifacts, chunk_claims, dataset_holders)] == [0, 0, 0]


def test_deletion_of_a_version_with_descendants_is_refused_with_their_names(database: Database, tmp_path: Path) -> None:
    store = in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, '{"a": 1}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    run = store.publish(tmp_path / "run", "s3://hanzo-ml/runs/r1/record", "run", inputs={"train": version.artifact.digest})
    path = tmp_path / "derived.jsonl"
    path.write_text('{"a": 2}\n')
    derived = NewVersion("derived", "jsonl", "u", "default", transform="halved", parents=[version.reference])
    create_from_files(database, store, derived, local_files(path, Format.JSONL))
    with database.write() as connection:
        record_artifact(connection, run, store.manifest(run))
    with pytest.raises(HanzoError, match="dataset d@1 is not deleted: dataset derived@1, run r1 refer to it"):
        delete_version(database, store, version.id, "u")
    assert content(store, version) == '{"a":1}\n'


def test_two_organizations_share_no_chunk(database: Database, store: Store, tmp_path: Path) -> None:
    ours, _ = create(database, store, tmp_path, '{"a": 1}\n', organization="acme")
    theirs, _ = create(database, store, tmp_path, '{"a": 1}\n', organization="rival")
    assert ours.content_sha256 == theirs.content_sha256 and ours.artifact.digest != theirs.artifact.digest
    delete_version(database, store, ours.id, "u")
    assert content(store, theirs) == '{"a":1}\n'
    assert chunk_folder(ours.artifact.uri) == "s3://hanzo-ml/datasets/@acme/_chunks"


def test_a_version_that_is_made_while_its_chunks_are_deleted_is_whole(database: Database, tmp_path: Path) -> None:
    """Both versions share their chunks; deletion and creation run concurrently, again and again."""
    store = in_folder(tmp_path)
    text = "".join(corpus(1_500_000))
    for turn in range(6):
        victim, _ = create(database, store, tmp_path, text, name=f"old{turn}")
        remover = threading.Thread(target=delete_version, args=(database, store, victim.id, "u"))
        remover.start()
        made, _ = create(database, store, tmp_path, text, name=f"new{turn}")
        remover.join()
        assert content(store, made).count("\n") == text.count("\n")
        delete_version(database, store, made.id, "u")
        assert chunks(store) == set()


def test_upload_in_progress_protects_its_chunks_from_a_deletion(database: Database, tmp_path: Path) -> None:
    store = in_folder(tmp_path)
    victim, _ = create(database, store, tmp_path, '{"a": 1}\n')
    held = chunks(store)
    claims = ChunkClaims(database, "default", f"{ALL}/other")
    claims.open("on-its-way")
    claims.claim("on-its-way", [uri.rpartition("/")[2] for uri in held])
    delete_version(database, store, victim.id, "u")
    assert chunks(store) == held
    claims.release(store, "on-its-way")
    assert chunks(store) == set()


def age_all(database: Database) -> None:
    with database.write() as connection:
        connection.execute(update(dataset_holders).values(updated_at=1))


def test_remains_of_an_abandoned_upload_are_removed_after_a_day(database: Database, tmp_path: Path) -> None:
    store = in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, '{"a": 1}\n')
    claims = ChunkClaims(database, "default", f"{ALL}/d")
    kept = chunks(store)
    claims.open("dead")
    with database.write() as connection:
        claims.keep_alive(connection, "dead", f"{ALL}/d/2/dead")
    claims.claim("dead", ["ab" * 32])
    store.put_bytes(f"{CHUNKS}/ab/{'ab' * 32}", b"half")
    store.put_bytes(f"{ALL}/d/2/dead/source/manifest.json", b"{}")
    claims.release_abandoned(store)
    assert len(chunks(store)) == len(kept) + 1, "it may be on its way still"
    age_all(database)
    claims.release_abandoned(store)
    assert chunks(store) == kept and store.list(f"{ALL}/d/2") == []
    assert content(store, version) == '{"a":1}\n'
    with pytest.raises(HanzoError, match="made no progress for a day"):
        claims.claim("dead", ["cd" * 32])


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from resources.ingest.version_creation import create_version
from resources.metadata.database import Database
left = int(sys.argv[5])
real = Store.put_bytes
def killed(self, uri, data):
    global left
    real(self, uri, data)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Store.put_bytes = killed
store = Store(StoreAddress.model_validate_json(sys.argv[3]))
path = Path(sys.argv[4])
create_version(Database(sys.argv[2]), store, name="d", path=path, user="u", organization="default")
"""


@pytest.mark.parametrize("puts", [1, 3, -1])
def test_killed_creation_leaves_no_visible_version_and_can_be_repeated(
    database_url: str, store: Store, tmp_path: Path, puts: int
) -> None:
    """Kill after `puts` stored objects, the last of which may be the last manifest."""
    database = Database(database_url)
    text = "".join(corpus(3_000_000))
    (tmp_path / "raw.jsonl").write_text(text)
    if puts < 0:
        version, _ = create(database, store, tmp_path, text, name="probe")
        puts = len(store.list(ALL))
        delete_version(database, store, version.id, "u")
    address = store.address.model_dump_json()
    arguments = [str(ROOT), database_url, address, str(tmp_path / "raw.jsonl"), str(puts)]
    environment = {**os.environ, **VARIABLES}
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, check=False)
    assert done.returncode == -9
    assert Datasets(database).list("default") == []
    version, is_new = create(database, store, tmp_path, text)
    assert is_new and version.version == 1
    assert content(store, version).count("\n") == text.count("\n")
    age_all(database)
    ChunkClaims(database, "default", f"{ALL}/d").release_abandoned(store)
    assert content(store, version).count("\n") == text.count("\n")
    delete_version(database, store, version.id, "u")
    assert store.list(ALL) == []


def test_concurrent_threads_create_one_version_per_content(database: Database, tmp_path: Path) -> None:
    store = in_folder(tmp_path)
    made: list[tuple[DatasetVersion, bool]] = []

    def work(number: int) -> None:
        folder = tmp_path / f"thread{number}"
        folder.mkdir()
        for turn in range(4):
            made.append(create(database, store, folder, f'{{"a": {turn}}}\n'))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = Datasets(database).list("default")
    assert len(made) == 12 and sum(is_new for _, is_new in made) == 4
    assert sorted(version.version for version in versions) == [1, 2, 3, 4]
    assert {content(store, version) for version in versions} == {f'{{"a":{turn}}}\n' for turn in range(4)}


def test_version_with_prepared_data_in_its_folder_is_not_deleted(database: Database, tmp_path: Path) -> None:
    store = in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, '{"a": 1}\n')
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x.jsonl").write_text("{}\n")
    inputs = {"dataset": version.artifact.digest}
    prepared = store.publish(tmp_path / "made", f"{version.storage_path}prepared/all/records", "dataset", inputs=inputs)
    with database.write() as connection:
        record_artifact(connection, prepared, store.manifest(prepared))
    with pytest.raises(HanzoError, match="is not deleted: dataset at"):
        delete_version(database, store, version.id, "u")


@pytest.mark.parametrize("kind", ["postgresql"])
def test_version_committed_during_cleanup_of_abandoned_uploads_survives(
    postgres_url: str, tmp_path: Path, kind: str
) -> None:
    """The upload sent no heartbeat for a day; a cleanup runs as it commits."""
    database, store = Database(postgres_url), in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, '{"a": 1}\n')
    with database.write() as connection:
        connection.execute(delete(dataset_versions).where(dataset_versions.c.id == version.id))
    age_all(database)
    claims = ChunkClaims(database, "default", f"{ALL}/d")
    with ThreadPoolExecutor(1) as pool:
        with database.write() as connection:
            claims.keep_alive(connection, version.id, version.storage_path)
            Datasets(database).add(connection, version)
            released = pool.submit(claims.release, store, version.id)
            until_one_waits(postgres_url)
        assert released.result() == 0
    assert content(store, version) == '{"a":1}\n'
