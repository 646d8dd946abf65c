"""A dataset with a schema contract, and its validation."""

import json
from typing import Any

from fastapi.testclient import TestClient

from recipes.contracts.dataset_contract import ColumnContract, Contract, Measures, ValidateParameters
from recipes.contracts.validation_results import ValidationFacts
from recipes.storage.artifact_store import Store
from recipes.validate import validate_records
from recipes.validation.record_blocks import iterate_lines
from resources.datasets.check_policy import Checks
from resources.datasets.check_verdicts import judge_version
from resources.datasets.validations import Validations
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.settings.settings import Settings

ROWS = [{"instruction": f"Who keeps lamp {n}?", "answer": "<b>She.</b>" if n else 5} for n in range(5)]

CONTRACT = Contract(columns={"answer": ColumnContract(type="string")})


def create(http: TestClient) -> dict[str, Any]:
    content = "".join(json.dumps(row) + "\n" for row in ROWS)
    made = http.post("/v1/datasets", data={"name": "d"}, files={"files": ("d.jsonl", content)})
    assert made.status_code == 201
    document: dict[str, Any] = made.json()
    return document


def validate(settings: Settings, made: dict[str, Any], tmp_path: Any) -> None:
    """Validate as the version asset does, without a separate process."""
    database, store = Database(settings.database_url), Store(settings.store)
    version = Datasets(database).read(f"{made['name']}@{made['version']}", "default")
    files = sorted(store.fetch(version.artifact, tmp_path / "cache").glob("*.jsonl"))
    statistics, violations = validate_records(
        iterate_lines(files), ValidateParameters(contract=CONTRACT), version.num_records, tmp_path
    )
    folder = tmp_path / "statistics"
    folder.mkdir()
    (folder / "statistics.json").write_text(statistics.model_dump_json())
    artifact = store.publish(folder, f"{version.storage_path}validate/x/statistics", "statistics")
    facts = ValidationFacts(violations=violations)
    verdicts = judge_version(facts, statistics, Checks(), Measures(), created_at=1, now=2)
    with database.write() as connection:
        Validations(database).set_version(connection, version, artifact, facts, verdicts)
    database.close()
