"""The command line on a real server: errors are one line and exit code 1.

The line is on standard error, and there is never a traceback.
"""

import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
import typer
from sqlalchemy import insert, select

from hanzo_ml.cli.job import format_time
from hanzo_ml.cli.local import run_module
from hanzo_ml.cli.model import print_proof
from hanzo_ml.cli.output import print_table
from resources.metadata.database import Database
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.version_lifecycle import ClientVersion, Registry
from resources.metadata.tables import model_versions
from resources.metadata.tracking.experiments import Experiments
from resources.metadata.tracking.runs import Runs
from tests.support.cli.command_line import Cli, cli, create, file, refusal, run
from tests.support.free_ports import free_port
from tests.support.recipes.hostile_yaml import LISTS
from tests.support.server_process import REPOSITORY, ServerProcess

__all__ = ["cli", "file"]

GOOD = '{"instruction": "Who keeps the lamp?", "answer": "The keeper."}\n'


def run_for_real(uri: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HANZO_ML_", "MLFLOW_"))}
    command = [sys.executable, "-c", "from hanzo_ml.cli import main; main()", *arguments]
    environment = {**clean, "HANZO_ML_TRACKING_URI": uri, "COLUMNS": "40"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.requirement("S8", "S9")
def test_model_registration_prints_its_checkpoint(cli: Cli, server: ServerProcess) -> None:
    """`--artifact` is `checkpoint-final` by default, which means the last checkpoint."""
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        run = http.post("/v1/runs", json={"experiment_name": "cli"}).json()["id"]
        for step in (1, 2):
            http.post(f"/v1/runs/{run}/artifacts", params={"key": f"checkpoint/step-{step}"}, content=b"w")
    done = cli("model", "register", "--name", "last", "--run", run)
    assert done.stdout == "last version 1: none, pending, of the artifact checkpoint/step-2\n", done.stderr
    promoted = cli("model", "promote", "--name", "last", "--version", "1", "--stage", "production").stdout.splitlines()
    assert promoted[0] == "last version 1: production"
    assert promoted[1].startswith("it is not served: ")


@pytest.mark.requirement("A1")
def test_installed_command_refuses_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    for arguments in (["dataset", "create", "--name", "d", "--path", str(tmp_path / "missing")], ["job", "get", "nobody"]):
        assert refusal(run_for_real(server.url, *arguments)) == refusal(run(server.url, *arguments))


@pytest.mark.requirement("S5")
def test_a_dataset_is_created_once_and_listed(cli: Cli, file: Callable[..., Path]) -> None:
    done = create(cli, file(GOOD), "listed")
    assert done.returncode == 0 and done.stdout.startswith("listed@1 created: 1 record, "), done.stderr
    assert "listed@1 exists already" in create(cli, file(GOOD), "listed").stdout
    listed = json.loads(cli("dataset", "list", "--name", "listed", "--json").stdout)
    assert [(item["name"], item["version"], item["num_records"]) for item in listed] == [("listed", 1, 1)]


def test_options_ignored_for_an_existing_version_are_reported(cli: Cli, file: Callable[..., Path]) -> None:
    said = ["dataset", "create", "--name", "again", "--path", str(file(GOOD)), "--tag", "a b", "--metadata", "owner=me"]
    assert cli(*said).returncode == 0
    assert len(cli(*said).stdout.splitlines()) == 1, "all of it is said already"
    more = [*said, "--tag", "new", "--metadata", "owner=you", "--metadata", "source=crawl"]
    output = cli(*more).stdout.splitlines()
    assert output[0].startswith("again@1 exists already with this content")
    assert output[1].startswith(
        "ignored, because sending a version again does not change it: tags new, metadata owner, source; "
        "`hanzo-ml dataset tag again@1 'a b' new` sets its tags; PATCH /v1/datasets/"
    )
    answer = json.loads(cli(*more, "--json").stdout)
    assert answer["not_taken"] == {"tags": ["new"], "metadata": {"owner": "you", "source": "crawl"}}
    assert (answer["tags"], answer["metadata"], answer["created"]) == (["a b"], {"owner": "me"}, False)
    table = file("question,answer\n1,2\n", "table.csv")
    lines = file('{"question": 1, "answer": 2}', "same.jsonl")
    assert create(cli, table, "formats").returncode == 0
    assert (
        "ignored, because sending a version again does not change it: format jsonl" in create(cli, lines, "formats").stdout
    )


def test_folder_upload_accepts_equal_names_in_subfolders(cli: Cli, file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "a.jsonl").write_text(GOOD)
    (tmp_path / "folder" / "inner" / "a.jsonl").write_text(GOOD.replace("lamp", "light"))
    done = create(cli, tmp_path / "folder", "folders")
    assert done.returncode == 0 and "2 records" in done.stdout, done.stderr


def test_missing_path_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    line = refusal(create(cli, tmp_path / "missing.jsonl"))
    assert f"there is no file or folder {tmp_path}/missing.jsonl: check --path" in line


def test_format_is_derived_from_file_endings(cli: Cli, file: Callable[..., Path], tmp_path: Path) -> None:
    done = cli("dataset", "create", "--name", "by-ending", "--path", str(file("a,b\n1,2\n", "DATA.CSV")), "--json")
    assert (json.loads(done.stdout)["format"], json.loads(done.stdout)["num_records"]) == ("csv", 1)
    (tmp_path / "many").mkdir()
    for name in ("a.csv", "B.JSONL", "README.txt"):
        (tmp_path / "many" / name).write_text(GOOD)
    assert "holds files of the formats csv, jsonl: choose one with --format" in refusal(create(cli, tmp_path / "many"))
    done = cli("dataset", "create", "--name", "said", "--path", str(tmp_path / "many"), "--format", "jsonl", "--json")
    assert json.loads(done.stdout)["num_records"] == 1
    assert "line 1: not JSON" in refusal(create(cli, file("words\n", "words.txt"))), "text is what is said to be text"


def test_path_that_is_not_a_file_is_refused_by_name(cli: Cli, file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.jsonl").symlink_to(file(GOOD))
    assert create(cli, tmp_path / "links", "linked").returncode == 0
    (tmp_path / "links" / "b.jsonl").symlink_to("nowhere")
    assert "b.jsonl is a broken link" in refusal(create(cli, tmp_path / "links"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl is a broken link, or not a regular file" in refusal(create(cli, tmp_path / "pipe.jsonl"))
    assert " cannot be fetched: use a file of this machine" in refusal(
        cli("dataset", "create", "--name", "d", "--path", "http://x/a.jsonl")
    )
    assert "a\\\\b.jsonl' is not allowed: rename it" in refusal(create(cli, file(GOOD, "a\\b.jsonl")))


def test_file_system_error_names_the_file(cli: Cli, file: Callable[..., Path], tmp_path: Path) -> None:
    assert create(cli, file(GOOD), "to-nowhere").returncode == 0
    target = file("", "in-the-way") / "folder"
    line = refusal(cli("dataset", "checkout", "to-nowhere", "--to", str(target)))
    assert str(tmp_path) in line and "Not a directory" in line


@pytest.mark.requirement("D5")
def test_malformed_line_is_refused_with_number_and_reason(cli: Cli, file: Callable[..., Path]) -> None:
    assert "data.jsonl, line 2: not JSON" in refusal(create(cli, file(GOOD + "{broken\n")))


def test_empty_file_is_refused_by_name(cli: Cli, file: Callable[..., Path]) -> None:
    assert "data.jsonl is empty" in refusal(create(cli, file("")))


def test_non_utf_8_file_is_refused_by_name(cli: Cli, file: Callable[..., Path]) -> None:
    assert "data.jsonl, line 1: not UTF-8" in refusal(create(cli, file(GOOD.replace("keeper", "für").encode("latin-1"))))


@pytest.mark.parametrize("name", ["data.json", "data.txt", "data"])
def test_file_with_another_ending_is_accepted_or_refused_by_name(cli: Cli, file: Callable[..., Path], name: str) -> None:
    done = create(cli, file(GOOD, name), "endings")
    if done.returncode:
        assert name in refusal(done)


def test_refused_file_stores_nothing(cli: Cli, file: Callable[..., Path]) -> None:
    refusal(create(cli, file(GOOD + "[]\n"), "never"))
    assert json.loads(cli("dataset", "list", "--name", "never", "--json").stdout) == []


def test_a_bad_name_is_refused(cli: Cli, file: Callable[..., Path]) -> None:
    assert "dataset name '../x' is not allowed" in refusal(create(cli, file(GOOD), "../x"))


def test_nan_in_a_file_is_refused_in_one_line(cli: Cli, file: Callable[..., Path]) -> None:
    bad = '{"instruction": "x", "answer": "y", "score": NaN}\n'
    assert "data.jsonl, line 1" in refusal(create(cli, file(bad)))


def test_a_job_with_an_unknown_recipe_is_refused_with_the_recipes_there_are(cli: Cli, file: Callable[..., Path]) -> None:
    assert create(cli, file(GOOD), "for-jobs").returncode == 0
    config = file("name: x\ndataset: for-jobs\nrecipe: smolm2\n", "job.yaml")
    line = refusal(cli("job", "submit", "--config", str(config)))
    assert "unknown recipe 'smolm2'" in line and "smollm2-135m-lora" in line


def test_job_with_unknown_parameter_is_refused_by_name(cli: Cli, file: Callable[..., Path]) -> None:
    assert create(cli, file(GOOD), "for-jobs").returncode == 0
    config = file("name: x\ndataset: for-jobs\nparameters: {learning_rat: 1}\n", "job.yaml")
    assert "learning_rat" in refusal(cli("job", "submit", "--config", str(config)))


JOBS = {
    "an unknown dataset": ("name: x\ndataset: nobody\n", "there is no dataset 'nobody'"),
    "an unknown key": ("name: x\ndataset: d\nrecpie: y\n", "recpie"),
    "no mapping": ("- a\n", "must be a mapping"),
    "no YAML": ("a: [", "is not valid YAML"),
    "a few lines that stand for millions": (LISTS, "aliases"),
    "no model and no name": ("recipe: x\n", "no model is named"),
    "parameters that are no mapping": ("name: x\ndataset: d\nparameters: 5\n", "parameters"),
    "a date for a name": ("name: 2026-01-01\ndataset: d\n", "name"),
    "another type": ("name: x\ndataset: d\ntype: evaluation\n", "type"),
    "another encoding": (b"name: f\xfcr\ndataset: d\n", "job.yaml"),
}


@pytest.mark.parametrize("what", JOBS)
def test_invalid_job_file_is_refused_in_one_line(cli: Cli, file: Callable[..., Path], what: str) -> None:
    text, words = JOBS[what]
    assert words in refusal(cli("job", "submit", "--config", str(file(text, "job.yaml"))))


def test_sweep_file_with_alias_bomb_is_refused_in_one_line(cli: Cli, file: Callable[..., Path]) -> None:
    assert "aliases" in refusal(cli("hpo", "start", "--config", str(file(LISTS, "sweep.yaml"))))


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (("hpo", "start"), "experiment: x\nsearch_space:\n  lr: {}\n  lr: {}\n", "line 4: 'lr'"),
        (("job", "submit"), "name: x\ndataset: d\nname: y\n", "line 3: 'name'"),
    ],
)
def test_duplicate_key_is_refused_with_its_line(
    cli: Cli, file: Callable[..., Path], command: tuple[str, ...], text: str, words: str
) -> None:
    """YAML keeps the last value, contrary to what a reader of the file sees first."""
    assert f"{words} is a duplicate: keep one" in refusal(cli(*command, "--config", str(file(text, "twice.yaml"))))


@pytest.mark.parametrize(
    ("command", "text", "line", "key"),
    [
        (("job", "submit"), "name: x\ndataset: d\nyes: 1\n", 3, "yes"),
        (("job", "submit"), "name: x\ndataset: d\nparameters:\n  seed: 1\n  null: 2\n  1: 3\n", 5, "null"),
        (("job", "estimate"), "name: x\ndataset: d\nparameters:\n- {1.5: 2}\n", 4, "1.5"),
        (("hpo", "start"), "experiment: x\nsearch_space:\n  on: {}\n", 3, "on"),
    ],
)
def test_non_text_key_is_refused_with_its_line(
    cli: Cli, file: Callable[..., Path], command: tuple[str, ...], text: str, line: int, key: str
) -> None:
    said = refusal(cli(*command, "--config", str(file(text, "odd.yaml"))))
    assert f"odd.yaml, line {line}: the key `{key}` is not a text in YAML: put it in quotes" in said


def test_set_option_without_a_value_is_refused(cli: Cli, file: Callable[..., Path]) -> None:
    assert "write KEY=VALUE" in refusal(cli("job", "submit", "--model", "m", "--set", "learning_rate"))


def test_set_option_works_with_empty_parameters_in_the_file(cli: Cli, file: Callable[..., Path]) -> None:
    assert create(cli, file(GOOD), "for-jobs").returncode == 0
    config = file("name: x\ndataset: for-jobs\nparameters:\n", "job.yaml")
    done = cli("job", "submit", "--config", str(config), "--set", "max_steps=3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config"]["parameters"] == {"max_steps": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["job", "submit", "--config", "/nowhere.yaml"], "there is no file /nowhere.yaml"),
        (["job", "submit", "--config", "/"], "/ is a folder: use a file in it"),
        (["job", "get", "nobody"], "there is no job 'nobody'"),
        (["job", "cancel", "nobody"], "there is no job 'nobody'"),
        (["job", "resume", "nobody"], "there is no job 'nobody'"),
        (["job", "resume", "nobody", "--from", "newest"], "--from newest is not a checkpoint: use latest, best, or a step"),
        (["job", "logs", "nobody"], "there is no job 'nobody'"),
        (["job", "list", "--status", "runing"], "status 'runing' is unknown"),
        (["run", "get", "nobody"], "nobody"),
        (["model", "promote", "--name", "m", "--version", "7", "--stage", "production"], "'m' has no version 7"),
        (["model", "promote", "--name", "m", "--version", "7", "--stage", "prod"], "stage 'prod' is unknown"),
        (["model", "undeploy", "m"], "there is no model 'm'"),
        (["model", "prove", "m", "7"], "'m' has no version 7"),
        (["model", "list", "--name", "m"], "there is no model 'm'"),
        (["model", "register", "--name", "m", "--run", "nobody"], "nobody"),
    ],
)
def test_missing_object_is_refused_in_one_line_by_name(cli: Cli, arguments: list[str], words: str) -> None:
    assert words in refusal(cli(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["dataset", "list"],
        ["job", "list"],
        ["job", "logs", "x", "--follow"],
        ["model", "prove", "m", "1"],
        ["run", "get", "r"],
    ],
)
def test_unreachable_server_is_reported_in_one_line_with_advice(arguments: list[str]) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    line = refusal(run(uri, *arguments))
    assert uri in line and "hanzo-ml up" in line


@pytest.mark.parametrize("uri", ["not a uri", "127.0.0.1:8057", "http://[bad", "ftp://127.0.0.1"])
def test_invalid_server_address_is_refused_in_one_line(uri: str) -> None:
    assert "HANZO_ML_TRACKING_URI" in refusal(run(uri, "dataset", "list"))


def test_ended_job_is_resumed_and_missing_checkpoint_is_refused(cli: Cli, file: Callable[..., Path]) -> None:
    submitted = cli("job", "submit", "--model", "some-model", "--json")
    job = json.loads(submitted.stdout)["id"]
    assert "cancel it first" in refusal(cli("job", "resume", job, "--gpus", "24"))
    cli("job", "cancel", job)
    for wish in ("best", "40"):
        assert "there is no checkpoint" in refusal(cli("job", "resume", job, "--from", wish))
    assert cli("job", "resume", job, "--gpus", "24").stdout == f"{job} queued\n"
    assert json.loads(cli("job", "get", job).stdout)["config"]["resumed"] == {"times": 1, "sent_back": [], "gpus": 24}


@pytest.mark.requirement("S6")
def test_lists_include_all_pages(server: ServerProcess, cli: Cli) -> None:
    """Only the first hundred experiments were printed."""
    database = Database(server.settings.database_url)
    model = ModelKey("default", "often registered")
    with database.write() as connection:
        Registry(database).ensure_model(connection, model)
        pointer = ClientVersion(source="s3://hanzo-models/x", created_by="ann")
        for _ in range(2):
            Registry(database).create(model, pointer, connection=connection)
        row = dict(
            connection.execute(select(model_versions).where(model.row_filter(model_versions)).limit(1)).mappings().one()
        )
        connection.execute(insert(model_versions), [{**row, "version": number} for number in range(3, 1003)])
        home = Experiments(database).ensure("of many runs", "default", connection=connection)
        for number in range(101):
            Experiments(database).ensure(f"one of many {number}", "default", connection=connection)
            Runs(database).create(home.id, name=f"run {number}", connection=connection)
    database.close()
    listed = json.loads(cli("model", "list", "--name", "often registered", "--json").stdout)
    assert [version["version"] for version in listed] == list(range(1002, 0, -1))
    names = {each["name"] for each in json.loads(cli("experiment", "list", "--json").stdout)}
    assert {f"one of many {number}" for number in range(101)} <= names
    for asked in ("of many runs", str(home.id)):
        runs = json.loads(cli("run", "list", "--experiment", asked, "--json").stdout)
        assert {run["name"] for run in runs} == {f"run {number}" for number in range(101)}
    everywhere = json.loads(cli("run", "list", "--json").stdout)
    assert {run["id"] for run in runs} <= {run["id"] for run in everywhere}
    printed = cli("run", "list", "--experiment", "of many runs").stdout
    assert all(run["id"] in printed for run in runs)
    assert "see `hanzo-ml experiment list`" in refusal(cli("run", "list", "--experiment", "nobody's"))


@pytest.mark.requirement("S7")
def test_runs_are_compared_side_by_side(server: ServerProcess, cli: Cli) -> None:
    ids: list[str] = []
    for rate, loss in (("2e-05", 0.5), ("0.0001", 0.25)):
        params = {"model": "zen", "learning_rate": rate, "lora_rank": 8 if ids else 64}
        made = httpx.post(f"{server.url}/v1/runs", json={"experiment_name": "e", "params": params}, trust_env=False).json()
        ids.append(made["id"])
        values = {"eval/loss": loss, "epoch": 3, "system/total_gpu_hours": 1.5}
        points = [{"key": key, "value": value} for key, value in values.items()]
        httpx.post(f"{server.url}/v1/runs/{made['id']}/metrics", json={"metrics": points}, trust_env=False)
    compared = json.loads(cli("run", "compare", *ids, "--json").stdout)
    assert [run["id"] for run in compared["runs"]] == ids
    assert compared["differences"]["params"] == {"learning_rate": ["2e-05", "0.0001"], "lora_rank": ["64", "8"]}
    printed = cli("run", "compare", *ids, "--metrics", "eval/loss,eval/accuracy").stdout
    rows = {words[0]: words[1:] for line in printed.splitlines() if len(words := line.split()) > 2}
    assert rows["learning_rate"] == ["2e-05", "0.0001"] and rows["lora_rank"] == ["64", "8"]
    assert rows["gpu"] == ["hours", "1.5", "1.5"] and rows["epoch"] == ["3.0", "3.0"]
    assert rows["eval/loss"] == ["0.5", "0.25"] and rows["eval/accuracy"] == ["-", "-"]
    assert "model" not in rows, "it is the same in both"
    misspelled = cli("run", "compare", *ids, "--metrics", "eval/los, eval/loss")
    assert misspelled.stderr == "none of these runs has a metric 'eval/los': did you mean 'eval/loss'?\n"
    assert misspelled.stdout.splitlines()[-1].split() == ["eval/loss", "0.5", "0.25"]
    for one in (ids[0], f"{ids[0]},"):
        assert "two or more runs are needed: `hanzo-ml run compare RUN RUN`" in refusal(cli("run", "compare", one))
    assert json.loads(cli("run", "compare", ",".join(ids), "--json").stdout)["runs"] == compared["runs"]


def test_proof_prints_names_that_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A file may have any name; the reason contains it."""
    problem = "s3://hanzo-ml/datasets/d/1/source/a[/red].jsonl is missing"
    node = {"label": "source files", "digest": "a" * 64, "files": 1, "size_bytes": 1, "facts": {"uri": "[/x]"}}
    chain = {**node, "problems": [problem], "made_from": [], "seen_above": False}
    print_proof({"chain": chain, "ok": False, "broken": [f"dataset version -> source files: {problem}"], "bytes_hashed": 1})
    assert capsys.readouterr().out.count("a[/red].jsonl is missing") == 2


ROW = ("a" * 32, "fine-tuned", "failed", "2026-11-26 09:25:45", "the recipe does not fit its base model: " * 5)


def test_piped_table_prints_one_line_per_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(("job", "name", "status", "submitted", "reason"), [ROW], "none")
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("job", "name", "status", "submitted", "reason"), [ROW], "none")
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_times_are_printed_in_local_time_like_in_job_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert format_time(1_795_665_345_000) == "2026-11-26 09:25:45"
    finally:
        monkeypatch.undo()
        time.tzset()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the test reads the command's standard error."""


def test_another_program_at_the_address_is_distinguished_from_the_api() -> None:
    with HTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        line = refusal(run(f"http://127.0.0.1:{other.server_port}/?", "job", "list"))
    assert "did not answer with JSON" in line and "HANZO_ML_TRACKING_URI" in line


@pytest.mark.parametrize("token", ["t\u00f6ken", "to\nken"])
def test_invalid_token_is_refused_in_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    assert "MLFLOW_TRACKING_TOKEN contains a character that is not allowed in a token" in refusal(cli("job", "list"))


def test_ctrl_c_during_imports_of_a_platform_program_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(REPOSITORY))))
    with pytest.raises(typer.Exit) as ended:
        run_module("interrupted")
    assert (ended.value.exit_code, capfd.readouterr().err) == (130, "")


def test_ctrl_c_during_imports_of_the_command_line_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    script = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]["hanzo-ml"]
    installed = "from {} import {} as main; main()".format(*script.split(":"))
    for arguments in (["-c", installed, "job", "list"], ["-m", "hanzo_ml", "job", "list"]):
        done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


def test_python_m_hanzo_ml_runs_the_command() -> None:
    command = [sys.executable, "-m", "hanzo_ml", "recipe", "show", "smollm2-135m-lora"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("name: smollm2-135m-lora\n")
