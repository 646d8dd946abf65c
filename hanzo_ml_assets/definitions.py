"""The Dagster code location, with all assets, sensors and the control plane."""

from pathlib import Path

import dagster as dg

from hanzo_ml_assets.command import build_command
from hanzo_ml_assets.component import component_tree
from hanzo_ml_assets.control_plane import ControlPlane
from sensors.account_ended_jobs import account_ended_jobs
from sensors.cancel_terminated_jobs import cancel_terminated_jobs
from sensors.check_versions_again import check_versions_again
from sensors.deploy_promotions import deploy_promotions
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.record_launched_runs import list_clicked_runs
from sensors.recover_restored_jobs import go_on_with_put_back_jobs
from sensors.recover_run_workers import recover_run_workers
from sensors.retry_dead_runs import retry_dead_runs
from sensors.run_sweeps import run_sweeps
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.start_submitted_preparations import start_submitted_preparations
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from sensors.watch_serving import watch_serving
from sensors.watch_training import watch_training
from sensors.withdraw_deployments import withdraw_deployments


@dg.definitions
def definitions() -> dg.Definitions:
    control_plane = ControlPlane()
    sensors = [
        split_new_versions,
        check_versions_again,
        start_submitted_jobs,
        start_submitted_preparations,
        run_sweeps,
        evaluate_completed_jobs,
        deploy_promotions,
        list_clicked_runs,
        recover_run_workers,
        retry_dead_runs,
        stop_cancelled_jobs,
        cancel_terminated_jobs,
        go_on_with_put_back_jobs,
        account_ended_jobs,
        watch_training,
        withdraw_deployments,
        watch_serving,
    ]
    platform = dg.Definitions(
        assets=[build_command()],
        sensors=[sensor.on(control_plane) for sensor in sensors],
        resources={"control_plane": control_plane},
        executor=dg.in_process_executor,  # heavy work always runs in its own process
    )
    # `load_from_defs_folder` would also import every component of installed libraries to describe it, none of them ours:
    # that was two fifths of the time in which a run loads the graph.
    folder = component_tree().build_defs(Path())
    return dg.Definitions.merge(folder, platform)
