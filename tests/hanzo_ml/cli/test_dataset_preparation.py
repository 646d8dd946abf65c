"""`dataset prepare` on a real server: submission, one-line refusals, and waiting for the job."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from recipes.contracts.job import Hardware, Job, Program
from recipes.contracts.parameters import PrepareParameters
from recipes.storage.artifact_store import Store
from resources.compute.base import Follower
from resources.compute.local.backend import LocalCompute
from resources.datasets.prepared_versions import Derivation, add_prepared_version, output_uris
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.jobs import PREPARATION, JobRecord, Jobs
from tests.support.cli.command_line import refusal, run
from tests.support.server_process import REPOSITORY, ServerProcess

ROWS = [{"instruction": f"Who keeps lamp {n}?", "answer": f"Keeper {n}."} for n in range(40)]


@pytest.fixture(scope="module")
def uri(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("raw") / "raw.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    assert run(server.url, "dataset", "create", "--name", "raw", "--path", str(path)).returncode == 0
    return server.url


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "prepare.yaml"
        path.write_text(text)
        return str(path)

    return write


def print_nothing(_: object) -> None:
    """Print nothing: standard output is the command's."""


class Supervisor:
    """Processes a submitted preparation as the asset graph does, without Dagster."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.database = Database(server.settings.database_url)
        self.store, self.jobs, self.folder = Store(server.settings.store), Jobs(self.database), folder

    def take(self, queued: JobRecord) -> None:
        asked = self.jobs.start(queued.id)
        parent = Datasets(self.database).read(asked.config["dataset"], asked.organization)
        parameters = PrepareParameters.model_validate(asked.config["parameters"])
        place = f"s3://hanzo-ml/datasets/{asked.config['name']}/{asked.id}"
        job = Job(
            id=asked.id,
            program=Program.PREPARE,
            inputs={"dataset": parent.artifact},
            parameters=parameters.model_dump(mode="json"),
            outputs=output_uris(place),
            result_uri=f"{place}/result.json",
            store=self.store.address,
            cache_dir=str(self.folder / "cache"),
            hardware=Hardware(cpu=1),
        )
        result = LocalCompute(self.folder / "jobs", source=REPOSITORY).run(
            job, Follower(line=print_nothing, phase=print_nothing)
        )
        add_prepared_version(
            self.database, self.store, Derivation(parent, asked.config["name"], parameters, "u"), result, asked
        )

    @contextmanager
    def doing(self, what: Callable[[JobRecord], object]) -> Iterator[None]:
        """Process each submitted preparation with this function."""
        done = Event()

        def look() -> None:
            while not done.is_set():
                with self.database.read() as connection:
                    queued = [job for job in self.jobs.queued(connection) if job.type == PREPARATION]
                for job in queued:
                    try:
                        what(job)
                    except Exception as error:  # otherwise command and test would wait forever
                        self.jobs.fail(job.id, f"the test's supervisor failed: {error!r}")
                done.wait(0.1)

        thread = Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@pytest.fixture
def supervisor(server: ServerProcess, tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(server, tmp_path)
    yield supervisor
    supervisor.database.close()


def test_submitted_preparation_becomes_a_version(uri: str, config: Callable[[str], str], supervisor: Supervisor) -> None:
    path = config("name: ready\naugment: {mask_pii: true}\nworkers: 1\n")
    submitted = run(uri, "dataset", "prepare", "raw@1", "--config", path)
    identifier, status = submitted.stdout.split()
    assert (submitted.returncode, status) == (0, "queued")
    assert json.loads(run(uri, "job", "get", identifier).stdout)["config"]["dataset"] == "raw@1"
    assert "cancelled" in run(uri, "job", "cancel", identifier).stdout
    with supervisor.doing(supervisor.take):
        made = run(uri, "dataset", "prepare", "raw", "--config", path, "--wait")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith(f"ready@1 created: {len(ROWS)} records, job ")
    (version,) = json.loads(run(uri, "dataset", "list", "--name", "ready", "--json").stdout)
    assert version["lineage"]["parent_datasets"] == ["raw@1"]
    assert version["metadata"]["rejected"] == {"duplicate": 1}
    assert run(uri, "dataset", "lineage", "ready@1").stdout.startswith("  ↑ dataset raw@1\n  ↑ source at ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("filter: {min_length: 64}\n", "count tokens: set tokenize.tokenizer"),
        ("filter: {dedupe: true}\n", "dedupe"),
        ("workers: 0\n", "workers"),
        ("name: ../x\n", "is not allowed"),
        ("name: 2026-11-22\n", "read by YAML as a date"),
        ("name: [\n", "is not valid YAML"),
        ("just words\n", "must be a mapping"),
    ],
)
def test_invalid_preparation_is_refused_in_one_line(uri: str, config: Callable[[str], str], text: str, words: str) -> None:
    before = run(uri, "job", "list", "--json").stdout
    assert words in refusal(run(uri, "dataset", "prepare", "raw", "--config", config(text), "--wait"))
    assert run(uri, "job", "list", "--json").stdout == before


def test_missing_dataset_or_file_is_refused_in_one_line(uri: str, config: Callable[[str], str], tmp_path: Path) -> None:
    path = config("name: x\n")
    assert "there is no dataset 'nobody'" in refusal(run(uri, "dataset", "prepare", "nobody", "--config", path))
    assert "there is no dataset 'raw@7'" in refusal(run(uri, "dataset", "prepare", "raw@7", "--config", path))
    assert "there is no file" in refusal(run(uri, "dataset", "prepare", "raw", "--config", str(tmp_path / "absent")))


def test_waiting_reports_failure_and_cancellation(uri: str, config: Callable[[str], str], supervisor: Supervisor) -> None:
    path = config("name: x\n")
    with supervisor.doing(lambda queued: supervisor.jobs.fail(queued.id, "no record is left: 40 language")):
        failed = refusal(run(uri, "dataset", "prepare", "raw", "--config", path, "--wait"))
    assert failed.endswith(" failed: no record is left: 40 language")
    with supervisor.doing(lambda queued: supervisor.jobs.cancel(queued.id)):
        cancelled = refusal(run(uri, "dataset", "prepare", "raw", "--config", path, "--wait"))
    assert cancelled.endswith(" cancelled: cancelled by the user")
