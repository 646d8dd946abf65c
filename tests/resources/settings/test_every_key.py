"""Every settings key is used by the product.

Regression: nothing read `logging.format` and `scheduler.checkpoint_bucket`.
"""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.contracts.job import BadConfiguration, Schedule
from resources.service_logs import JsonFormatter
from resources.settings.settings import SECTIONS
from resources.stack.services import list_services
from tests.support.resources.settings_files import ROOT, SPECIFICATION, load

PRODUCT = ("api", "hanzo_ml", "hanzo_ml_assets", "recipes", "resources", "sensors")
SETTINGS = ROOT / "resources" / "settings"
KEYS = [(name, key) for name, section in SECTIONS.items() for key in section.model_fields]


@pytest.fixture(scope="module")
def source() -> str:
    """Return all product code except that of the settings."""
    files = (file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py")) if SETTINGS not in file.parents)
    return "\n".join(file.read_text() for file in files)


@pytest.fixture(scope="module")
def settings_source() -> str:
    return "\n".join(file.read_text() for file in sorted(SETTINGS.glob("*.py")))


@pytest.mark.parametrize(("section", "key"), KEYS, ids=[f"{section}.{key}" for section, key in KEYS])
def test_every_settings_key_is_read_by_the_code(section: str, key: str, source: str, settings_source: str) -> None:
    owner = rf"\w*(?:{section}|{section.removesuffix('s')}|limits|settings)\w*"
    is_read = re.search(rf"\b{owner}\.{key}\b|\"{key}\"", source)
    assert is_read or re.search(rf"\bself\.{key}\b|\bget\(\"{key}\"\)", settings_source)


def test_the_specification_names_no_other_keys() -> None:
    written = {(section, key) for section, keys in yaml.safe_load(SPECIFICATION).items() for key in keys}
    assert written <= set(KEYS)


@pytest.mark.parametrize("text", ["scheduler: {checkpoint_bucket: mine}", "storage: {buckets: {checkpoints: mine}}"])
def test_checkpoint_bucket_can_be_set_under_either_name(tmp_path: Path, text: str) -> None:
    loaded = load(tmp_path, text)
    assert loaded.store.buckets["checkpoints"] == loaded.scheduler.checkpoint_bucket == "mine"
    assert loaded.store.buckets["datasets"] == "hanzo-ml-datasets"


def test_two_buckets_of_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"scheduler.checkpoint_bucket is 'a' and storage.buckets.checkpoints 'b'"):
        load(tmp_path, "scheduler: {checkpoint_bucket: a}\nstorage: {buckets: {checkpoints: b}}")


@pytest.mark.requirement("J7", "Z10")
@pytest.mark.parametrize(("queue", "priority"), [("interactive", "low"), ("batch", "medium"), ("production", "high")])
def test_priorities_have_the_names_of_queues_too(tmp_path: Path, queue: str, priority: str) -> None:
    assert Schedule.model_validate({"priority": queue}).priority == priority
    assert (
        load(tmp_path, f"scheduler: {{quotas: {{acme: {{priority: {queue}}}}}}}").scheduler.quotas["acme"].priority
        == priority
    )


def test_services_log_in_the_format_and_at_the_level_of_the_settings(tmp_path: Path) -> None:
    settings = load(tmp_path, "logging: {level: warning, format: json}")
    commands = {service.name: " ".join(service.command) for service in list_services(settings)}
    assert "--log-level warning --log-format json" in commands["engine"]
    for name in ("code-server", "dagster-daemon", "dagster-webserver"):
        assert "-log-level warning --log-format json" in commands[name]


@pytest.mark.parametrize(("format", "level", "seen"), [("json", "info", 2), ("text", "info", 2), ("json", "warning", 1)])
def test_service_logs_have_the_configured_format_and_level(format: str, level: str, seen: int) -> None:
    program = (
        "import logging; from resources.service_logs import configure_logs\n"
        f"configure_logs({level!r}, {format!r})\n"
        "log = logging.getLogger('relay'); log.info('sent %d\\nevents', 3); log.warning('late')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    if format == "text":
        assert "INFO sent 3" in done.stderr and "WARNING late" in lines[-1]
        return
    found = [json.loads(line) for line in lines]
    assert len(found) == seen and found[-1] | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "relay",
        "message": "late",
    }


def test_an_error_has_its_traceback_in_one_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("api", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line and "ValueError: broken" in json.loads(line)["exception"]
