"""`hanzo-ml dataset check` and `report` on a real server: findings in words, and exit codes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hanzo_ml.cli.dataset_checks import print_checks
from recipes.contracts.validation_results import ValidationFacts, Violations
from resources.datasets.check_policy import Check
from resources.datasets.check_verdicts import Verdict
from resources.datasets.validations import Validations
from resources.metadata.database import Database
from resources.metadata.dataset_problems import clear_problem, record_problem
from resources.metadata.datasets import Datasets
from tests.support.api.dataset_contract import validate
from tests.support.cli.command_line import refusal, run
from tests.support.server_process import ServerProcess

GOOD = '{"instruction": "Who keeps the lamp?", "answer": "The keeper."}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("checks")
    (folder / "d.jsonl").write_text(GOOD)
    with ServerProcess(folder / "server") as server:
        for name in ("d", "leaky"):
            assert run(server.url, "dataset", "create", "--name", name, "--path", str(folder / "d.jsonl")).returncode == 0
        yield server


@pytest.fixture
def uri(server: ServerProcess) -> str:
    return server.url


@pytest.mark.parametrize("reference", ["d", "d@1"])
def test_unchecked_version_is_reported_as_pending(uri: str, reference: str) -> None:
    done = run(uri, "dataset", "check", reference)
    assert done.returncode == 0
    assert "d@1 was not checked yet" in " ".join(done.stdout.split())
    assert json.loads(run(uri, "dataset", "check", reference, "--json").stdout)["status"] == "pending"


def test_report_of_an_unchecked_version_is_refused_without_writing(uri: str, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    assert "d@1 was not checked yet" in refusal(run(uri, "dataset", "report", "d@1", "--out", str(target)))
    assert not target.exists()


@pytest.mark.requirement("B17")
def test_a_report_is_one_page_named_after_its_version(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, work = tmp_path / "d.jsonl", tmp_path / "work"
    raw.write_text(GOOD)
    made = json.loads(run(server.url, "dataset", "create", "--name", "checked", "--path", str(raw), "--json").stdout)
    validate(server.settings, made, tmp_path)
    work.mkdir()
    monkeypatch.chdir(work)
    done = run(server.url, "dataset", "report", "checked@1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "checked-1.html\n", "")
    assert [path.name for path in work.iterdir()] == ["checked-1.html"]
    page = (work / "checked-1.html").read_bytes()
    assert page == httpx.get(f"{server.url}/v1/datasets/{made['id']}/report", trust_env=False).content
    assert b"Who keeps the lamp?" in page
    assert re.findall(rb"""(?:src|href)=["'](?!data:|#)[^"']*""", page) == [], "it is read without the server"
    assert run(server.url, "dataset", "report", "checked@1", "--out", str(work / "r.html")).stdout == f"{work / 'r.html'}\n"
    assert (work / "r.html").read_bytes() == page


@pytest.mark.parametrize("reference", ["nobody", "d@7"])
def test_unknown_version_is_refused_in_one_line(uri: str, reference: str) -> None:
    for command in ("check", "report"):
        assert f"there is no dataset '{reference}'" in refusal(run(uri, "dataset", command, reference))


def test_blocked_version_is_listed_with_its_reason(server: ServerProcess) -> None:
    database = Database(server.settings.database_url)
    version = Datasets(database).read("leaky", "default")
    reasons = ("1 of 1 test records stand in d@1",)
    found = Verdict(check=Check.LEAKAGE, passed=False, severity="error", blocking=True, reasons=reasons)
    with database.write() as connection:
        facts = ValidationFacts(violations=Violations())
        Validations(database).set_version(connection, version, version.artifact, facts, [found])
    database.close()
    listed = run(server.url, "dataset", "list").stdout.split("dataset ")
    checks = {lines.split()[0]: lines.split()[-2:] for lines in listed if lines}
    assert (checks["d@1"], checks["leaky@1"]) == (["checks", "pending"], ["checks", "blocked"])
    shown = json.loads(run(server.url, "dataset", "show", "leaky").stdout)
    assert shown["checks"] == {
        "status": "blocked",
        "blocked": "dataset leaky@1 did not pass its check leakage: 1 of 1 test records stand in d@1",
        "problem": "",
    }


def test_failed_check_run_is_reported_until_it_is_cleared(server: ServerProcess) -> None:
    database = Database(server.settings.database_url)
    version = Datasets(database).read("d", "default")
    with database.write() as connection:
        record_problem(connection, version, "could not be checked: the contract [names] no column")
    refused = refusal(run(server.url, "dataset", "check", "d", "--wait"))
    assert "d@1 could not be checked: the contract [names] no column. Repair that, then" in refused
    assert "d@1 could not be checked" in refusal(run(server.url, "dataset", "check", "d"))
    assert "problem" in run(server.url, "dataset", "list", "--name", "d").stdout
    with database.write() as connection:
        clear_problem(connection, version)
    database.close()
    assert run(server.url, "dataset", "check", "d").returncode == 0
    assert "pending" in run(server.url, "dataset", "list", "--name", "d").stdout


def test_failed_non_blocking_check_does_not_fail_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = {
        "check": "personal_data",
        "passed": False,
        "severity": "warn",
        "blocking": False,
        "note": "",
        "reasons": ["45 email"],
    }
    print_checks(
        {"name": "d", "version": 1, "status": "failed", "problem": "", "checks": [verdict], "violations": {"first": []}}
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "45 email" in shown and shown.endswith("d@1 may be trained on: no check that failed blocks it")


def test_markup_in_the_data_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = {"check": "contract", "passed": False, "severity": "error", "blocking": True, "note": ""}
    violation = {"line": 3, "column": "[b]", "reason": "must be string", "value": "[/red]"}
    print_checks(
        {
            "name": "d",
            "version": 1,
            "status": "blocked",
            "checks": [{**verdict, "reasons": ["line 3, [b] must be string [/red]"]}],
            "violations": {"first": [violation]},
        }
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "line 3 [b] must be string: [/red]" in shown
    assert "error, blocks" in shown
