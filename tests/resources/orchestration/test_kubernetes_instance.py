"""Dagster instance on a cluster, loaded as by its daemon, with its history in PostgreSQL."""

from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster_aws.s3 import S3ComputeLogManager
from rich.console import Console

from recipes.contracts.job import BadConfiguration
from resources.orchestration.instance import migrate_dagster
from resources.orchestration.kubernetes_instance import kubernetes_instance
from resources.orchestration.kubernetes_launcher import KubernetesRunLauncher
from resources.orchestration.postgres_storage import PooledRunStorage
from resources.settings.settings import Settings
from tests.resources.orchestration.job_api import job_api
from tests.support.postgres_server import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]


@pytest.fixture
def settings(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    with job_api(tmp_path) as (_, kubeconfig):
        document = {
            "database": {"url": postgres_url},
            "storage": {"endpoint": "http://127.0.0.1:9", "access_key": "key", "secret_key": "secret"},
            "scheduler": {"kubeconfig": str(kubeconfig)},
            "dagster": {"run_pods": {"max_launched": 7}},
        }
        home = tmp_path / "home"
        home.mkdir()
        (home / "config.yaml").write_text(yaml.safe_dump(document))
        monkeypatch.setenv("HANZO_ML_HOME", str(home))
        monkeypatch.setenv("HANZO_ML_SCHEDULER_BACKEND", "kubernetes")
        loaded = Settings.load()
        for name, value in loaded.storage.variables.items():
            monkeypatch.setenv(name, value)
        return loaded


@pytest.mark.slow
def test_instance_of_a_cluster_loads_with_its_launcher_logs_and_history(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate_dagster(settings, Console())
    monkeypatch.setenv("DAGSTER_HOME", str(settings.dagster_home))
    with dg.DagsterInstance.get() as instance:
        assert isinstance(instance.run_launcher, KubernetesRunLauncher)
        assert isinstance(instance.compute_log_manager, S3ComputeLogManager)
        assert isinstance(instance.run_storage, PooledRunStorage)
        assert instance.run_monitoring_enabled and instance.run_monitoring_max_resume_run_attempts == 0
        concurrency = instance.get_concurrency_config()
        queue = concurrency.run_queue_config
        assert queue is not None and queue.max_concurrent_runs == -1
        assert queue.tag_concurrency_limits == [{"key": "dagster/from_ui", "value": "true", "limit": 7}]
        assert concurrency.pool_config.default_pool_limit is None
        assert instance.event_log_storage.get_pool_limits() == []


def test_instance_without_a_shared_database_and_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"set database\.url to PostgreSQL"):
        kubernetes_instance(Settings(home=tmp_path))
    with pytest.raises(BadConfiguration, match=r"set storage\.endpoint"):
        kubernetes_instance(Settings.model_validate({"home": tmp_path, "database": {"url": "postgresql://u@h/d"}}))
