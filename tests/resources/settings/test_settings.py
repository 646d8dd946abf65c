"""Settings: file, environment overrides, errors that name the key, and masked secrets.

The specification's example file loads.
"""

import errno
import io
import os
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from sqlalchemy import make_url

from recipes.contracts.job import BadConfiguration
from resources.metadata.database import Database
from resources.settings import settings
from resources.settings.document import home_folder_error
from resources.settings.settings import Settings
from resources.stack.services import service_environment
from tests.support.recipes.hostile_yaml import BOMBS
from tests.support.resources.settings_files import ROOT, SPECIFICATION, load

CANARY = "c4n4ry-s3cr3t"
KEYS = {"HANZO_STORAGE_ACCESS_KEY": "access-canary", "HANZO_STORAGE_SECRET_KEY": CANARY}


def clean_environment(folder: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_")}
    return {**kept, "HANZO_ML_HOME": str(folder), **variables}


def show(folder: Path, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m resources.settings.settings` in this process."""
    if text:
        (folder / "config.yaml").write_text(text)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), patch.dict(os.environ, clean_environment(folder, **variables), clear=True):
        try:
            settings.show()
        except SystemExit as end:
            code = 1  # as Python does with a text: print it and exit with 1
            print(end.code, file=err)
        except Exception:
            code = 1
            err.write(traceback.format_exc())
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def without_keys(document: Any, *keys: str) -> Any:
    return {name: value for name, value in document.items() if name not in keys}


@pytest.mark.requirement("J6", "Q5", "R1", "R2")
def test_configuration_of_the_specification_loads_value_by_value(tmp_path: Path) -> None:
    loaded = load(tmp_path, SPECIFICATION, **KEYS)
    written = yaml.safe_load(SPECIFICATION)
    read = loaded.model_dump(mode="json")
    for section in ("server", "stream", "auth", "scheduler", "hpo", "metrics", "logging"):
        assert read[section].items() >= written[section].items(), section
    assert loaded.database_url == "postgresql://hanzo:password@postgres:5432/hanzo_ml"
    assert loaded.storage.endpoint == loaded.store.root == "http://minio:9000"
    assert loaded.store.buckets == written["storage"]["buckets"]
    assert loaded.storage.access_key is not None and loaded.storage.secret_key is not None
    assert loaded.storage.access_key.get_secret_value() == "access-canary"
    assert loaded.storage.secret_key.get_secret_value() == CANARY


def test_object_store_keys_are_process_variables_and_not_part_of_its_address(tmp_path: Path) -> None:
    """Jobs store addresses without secrets.

    The keys are AWS variables of the processes that start the jobs.
    """
    loaded = load(tmp_path, SPECIFICATION, **KEYS, HANZO_ML_STORAGE_ENCRYPTION="aws:kms", HANZO_ML_STORAGE_KMS_KEY="key-1")
    assert loaded.storage.variables == {"AWS_ACCESS_KEY_ID": "access-canary", "AWS_SECRET_ACCESS_KEY": CANARY}
    assert service_environment(loaded).items() >= loaded.storage.variables.items()
    assert CANARY not in loaded.store.model_dump_json() and "access-canary" not in loaded.store.model_dump_json()
    assert (loaded.store.encryption, loaded.store.kms_key) == ("aws:kms", "key-1")
    (tmp_path / "config.yaml").unlink()
    assert load(tmp_path).storage.variables == {}


@pytest.mark.parametrize(
    "variables",
    [
        {"HANZO_ML_STORAGE_ENDPOINT": "http://s3:9000", "HANZO_ML_STORAGE_ACCESS_KEY": "a"},
        {"HANZO_ML_STORAGE_ENDPOINT": "http://s3:9000", "HANZO_ML_STORAGE_SECRET_KEY": "a"},
        {"HANZO_ML_STORAGE_KMS_KEY": "a"},
        {"HANZO_ML_STORAGE_ENCRYPTION": "rot13"},
    ],
)
def test_incomplete_object_store_settings_are_refused(tmp_path: Path, variables: dict[str, str]) -> None:
    with pytest.raises(BadConfiguration, match="storage"):
        load(tmp_path, **variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HANZO_ML_ENGINE_HOST": "0.0.0.0"}, "the engine has no sign-in: keep host on 127.0.0.1"),
        ({"HANZO_ML_ENGINE_TOKEN": "short"}, "use 32 to 500 characters"),
        ({"HANZO_ML_ENGINE_MODE": "fetch"}, "HANZO_ML_ENGINE_MODE"),
    ],
)
def test_engine_settings_that_would_be_unsafe_are_refused(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        load(tmp_path, **variables)


def test_engine_that_pulls_listens_on_a_network_and_hides_its_token(tmp_path: Path) -> None:
    text = f"engine: {{mode: pull, host: 0.0.0.0, url: 'http://engine.hanzo.svc:8043/', token: {CANARY * 3}}}"
    loaded = load(tmp_path, text)
    assert (loaded.engine.host, loaded.engine_url) == ("0.0.0.0", "http://engine.hanzo.svc:8043")
    assert loaded.engine_cache == tmp_path / "engine"
    assert CANARY not in str(loaded.masked()) + repr(loaded)


@pytest.mark.requirement("Z34")
def test_default_settings_are_embedded_mode_in_one_folder(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.database_url == f"sqlite:///{tmp_path}/hanzo-ml.db"
    assert loaded.store.root == (tmp_path / "objects").as_uri()
    assert (loaded.server.host, loaded.server.port) == ("127.0.0.1", 8057)
    assert (loaded.dagster.port, loaded.engine.port, loaded.metrics.port) == (3000, 8043, 9090)


@pytest.mark.requirement("R3")
def test_a_variable_overrides_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    text = "server: {port: 1111, workers: 3}\n"
    loaded = load(tmp_path, text, HANZO_ML_SERVER_PORT="2222", HANZO_ML_SCHEDULER_GPU_TYPES="a, b")
    assert (loaded.server.port, loaded.server.workers, loaded.server.host) == (2222, 3, "127.0.0.1")
    assert loaded.scheduler.gpu_types == ("a", "b")


@pytest.mark.requirement("R3")
def test_the_three_variables_that_the_specification_names_reach_their_keys(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        HANZO_ML_DATABASE_URL="postgresql://h/d",
        HANZO_ML_STORAGE_ENDPOINT="http://minio:9000",
        HANZO_ML_STREAM_BROKERS="kafka:9092",
    )
    assert (loaded.database_url, loaded.store.root) == ("postgresql://h/d", "http://minio:9000")
    assert loaded.stream.brokers == "kafka:9092"


@pytest.mark.requirement("Z19")
def test_a_bucket_has_a_nested_variable(tmp_path: Path) -> None:
    loaded = load(tmp_path, "storage: {buckets: {datasets: d}}\n", HANZO_ML_STORAGE_BUCKETS_MODELS="mine")
    assert loaded.store.buckets == {"datasets": "d", "checkpoints": "hanzo-ml-checkpoints", "models": "mine"}


@pytest.mark.requirement("R4", "Z19")
def test_variables_of_the_client_are_ignored(tmp_path: Path) -> None:
    load(tmp_path, HANZO_ML_TRACKING_URI="http://x", HANZO_ML_EXPERIMENT="e")


@pytest.mark.requirement("R2")
def test_substituted_variable_cannot_add_yaml_structure(tmp_path: Path) -> None:
    loaded = load(tmp_path, 'storage: {kms_key: "${B}:9092", encryption: "aws:kms"}\n', B='x"}\nserver: {port: 1}\n#')
    assert loaded.storage.kms_key == 'x"}\nserver: {port: 1}\n#:9092'
    assert loaded.server.port == 8057


def test_substituted_variable_may_be_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, "server: {port: '${PORT}'}\n", PORT="4321").server.port == 4321


@pytest.mark.requirement("R5")
@pytest.mark.parametrize(
    ("text", "variables", "named"),
    [
        ("server: {prt: 1}", {}, "server.prt"),
        ("servr: {port: 1}", {}, "servr"),
        ("storage: {buckets: {dataset: x}}", {}, "storage.buckets.dataset"),
        ("home: /tmp", {}, "home"),
        ("server: {port: 0}", {}, "server.port"),
        ("server: {port: eighty}", {}, "server.port"),
        ("logging: {level: loud}", {}, "logging.level"),
        ("hpo: {default_strategy: luck}", {}, "hpo.default_strategy"),
        ("stream: {brokers: '${NOT_SET}'}", {}, "NOT_SET"),
        ("- a list", {}, "mapping"),
        ("server: {port: [", {}, "YAML"),
        ("server: 5", {}, "server"),
        ("server: 5", {"HANZO_ML_SERVER_PORT": "1"}, "server"),
        ("5: {port: 1}", {}, "5"),
        ("", {"HANZO_ML_SERVER_PRT": "1"}, "HANZO_ML_SERVER_PRT"),
        ("", {"HANZO_ML_SERVR_PORT": "1"}, "HANZO_ML_SERVR_PORT"),
        ("", {"HANZO_ML_SERVER": "1"}, "HANZO_ML_SERVER"),
        ("", {"HANZO_ML_STORAGE_BUCKETS_MODEL": "x"}, "HANZO_ML_STORAGE_BUCKETS_MODEL"),
        ("", {"HANZO_ML_STORAGE_BUCKETS": "x"}, "storage.buckets"),
        ("", {"HANZO_ML_SERVER_PORT": "x"}, "server.port"),
        ("", {"HANZO_ML_CONFIG": "/nowhere.yaml"}, "/nowhere.yaml"),
    ],
)
def test_invalid_setting_is_named_in_one_line(tmp_path: Path, text: str, variables: dict[str, str], named: str) -> None:
    with pytest.raises(BadConfiguration) as caught:
        load(tmp_path, text, **variables)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_variable_is_not_attributed_to_the_file(tmp_path: Path) -> None:
    for name in ("HANZO_ML_SERVER_PORT", "HANZO_ML_SCHEDULER_MAX_CONCURRENT_JOBS"):
        with pytest.raises(BadConfiguration, match=f"^{name}: "):
            load(tmp_path, "server: {workers: 2}\n", **{name: "many"})
    with pytest.raises(BadConfiguration, match=r"config\.yaml: 'server\.workers'"):
        load(tmp_path, "server: {workers: many}\n", HANZO_ML_SERVER_PORT="8057")


@pytest.mark.parametrize("variables", [{}, {"HANZO_ML_SERVER_PORT": "1234"}])
def test_section_without_keys_has_its_defaults(tmp_path: Path, variables: dict[str, str]) -> None:
    """With all keys of a section commented out, YAML reads null."""
    loaded = load(tmp_path, "server:\n  # port: 9999\nlogging:\n", **variables)
    assert loaded.server.port == int(variables.get("HANZO_ML_SERVER_PORT", "8057"))


def test_a_file_in_another_encoding_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes("stream: {brokers: 'für'}\n".encode("latin-1"))
    with pytest.raises(BadConfiguration, match=r"config\.yaml"):
        load(tmp_path)


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_alias_bomb_is_refused_in_one_line(tmp_path: Path, bomb: str) -> None:
    """Expanding variables in all aliased values would exhaust memory and time."""
    with pytest.raises(BadConfiguration, match=r"config\.yaml is not valid YAML: with its aliases") as caught:
        load(tmp_path, BOMBS[bomb])
    assert "\n" not in str(caught.value)


def test_invalid_yaml_is_reported_by_position_without_its_content(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"config\.yaml, line 2, column \d+: not valid YAML") as caught:
        load(tmp_path, f"storage:\n  secret_key: *{CANARY}\n")
    assert CANARY not in str(caught.value)


def test_yaml_alias_is_resolved(tmp_path: Path) -> None:
    loaded = load(tmp_path, "server: {host: &host 127.0.0.2}\nstream: {brokers: *host}\n")
    assert loaded.server.host == loaded.stream.brokers == "127.0.0.2"


SECRETS: dict[str, tuple[str, dict[str, str]]] = {
    "in the file": (f"storage: {{access_key: {CANARY}, secret_key: {CANARY}}}", {}),
    "through a variable of the file": ("storage: {secret_key: '${KEY}'}", {"KEY": CANARY}),
    "in a variable": ("", {"HANZO_ML_STORAGE_SECRET_KEY": CANARY, "HANZO_ML_STORAGE_ACCESS_KEY": CANARY}),
    "password of the database": ("", {"HANZO_ML_DATABASE_URL": f"postgresql://user:{CANARY}@h/d"}),
    "password of the database as a parameter": ("", {"HANZO_ML_DATABASE_URL": f"postgresql://h/d?user=u&password={CANARY}"}),
    "password of the storage endpoint": ("", {"HANZO_ML_STORAGE_ENDPOINT": f"http://user:{CANARY}@minio:9000"}),
}


@pytest.mark.requirement("R5")
@pytest.mark.parametrize("where", SECRETS)
def test_config_show_never_shows_a_secret(tmp_path: Path, where: str) -> None:
    text, variables = SECRETS[where]
    done = show(tmp_path, text, **variables)
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert "**" in done.stdout


REFUSED: dict[str, tuple[str, dict[str, str]]] = {
    "a number where a text belongs": ("storage: {secret_key: 4815162342}", {}),
    "a list where a text belongs": (f"storage: {{secret_key: [{CANARY}]}}", {}),
    "a misspelled key": (f"storage: {{secret_kye: {CANARY}}}", {}),
    "a section that is no mapping": (f"storage: {CANARY}", {}),
    "an open quote": (f'storage:\n  secret_key: "{CANARY}\n  access_key: "x"\n', {}),
    "a database URL that is none": ("", {"HANZO_ML_DATABASE_URL": f"host=h password={CANARY}"}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refusal_shows_no_secret_and_no_traceback(tmp_path: Path, why: str) -> None:
    text, variables = REFUSED[why]
    done = show(tmp_path, text, **variables)
    assert done.returncode == 1, done.stdout
    assert CANARY not in done.stderr and "4815162342" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_config_show_prints_the_settings_in_force(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SPECIFICATION)
    command = [sys.executable, "-c", "from hanzo_ml.cli import main; main()", "config", "show"]
    environment = clean_environment(tmp_path, HANZO_ML_SERVER_PORT="1234", **KEYS)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["server"].items() >= {"host": "0.0.0.0", "port": 1234, "workers": 4}.items()
    written = without_keys(yaml.safe_load(SPECIFICATION)["storage"], "access_key", "secret_key")
    assert printed["storage"].items() >= written.items()
    assert "hanzo:***@postgres" in printed["database"]["url"]
    assert CANARY not in done.stdout and "access-canary" not in done.stdout


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "dagster.example"])
def test_dagster_without_sign_in_is_restricted_to_this_machine(tmp_path: Path, host: str) -> None:
    with pytest.raises(BadConfiguration, match="no sign-in"):
        Settings.load({"HANZO_ML_HOME": str(tmp_path), "HANZO_ML_DAGSTER_HOST": host})


def test_dagster_may_listen_on_the_network_of_a_cluster(tmp_path: Path) -> None:
    loaded = load(tmp_path, "dagster: {host: 0.0.0.0}\nscheduler: {backend: kubernetes}")
    assert loaded.dagster.host == "0.0.0.0"


@pytest.mark.parametrize(
    "url", ["dagster:3000", "ftp://dagster", "http://", "http://a/dagster", "http://u:p@a", "http://a?b"]
)
def test_address_of_dagster_is_checked(tmp_path: Path, url: str) -> None:
    with pytest.raises(BadConfiguration, match=r"dagster.url': no address such as"):
        load(tmp_path, HANZO_ML_DAGSTER_URL=url)
    assert (
        load(tmp_path, HANZO_ML_DAGSTER_URL="http://dagster-webserver:3000/").dagster.url == "http://dagster-webserver:3000"
    )


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (OSError(errno.EACCES, "Permission denied", "/srv/state"), "/srv/state: Permission denied: set HANZO_ML_HOME"),
        (OSError(errno.ENOSPC, "No space left on device", "/srv/state"), "/srv/state: No space left on device: free some"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "[Errno 98] Address already in use"),
    ],
)
def test_operating_system_error_of_the_state_folder_names_a_remedy(refused: OSError, message: str) -> None:
    assert str(home_folder_error(refused)).startswith(message)


@pytest.mark.parametrize("name", ["a%2Fb", "what?", "100%", "#1", "ü b"])
def test_the_state_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    settings = load(tmp_path / name)
    database = Database(settings.database_url)
    settings.home.mkdir()
    database.migrate()
    database.close()
    assert (tmp_path / name / "hanzo-ml.db").is_file()
    assert settings.is_own_database(make_url(settings.database_url))
