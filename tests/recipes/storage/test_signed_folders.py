"""A command's checkpoints on a cluster: pods save and restore them through signed URLs."""

import os
from pathlib import Path

from recipes.contracts.job import Program
from recipes.storage import object_names
from tests.support.folder_contents import OLDEST, read_folder, write_folder
from tests.support.recipes.folder_snapshots import publish, restore
from tests.support.server_process import ServerProcess
from tests.support.signed_store import program_job, store_in_pod, submit

PLACE = "s3://hanzo-ml/checkpoints/in-pod"


def test_pod_restores_the_folder_that_another_saved(server_of_pods: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    saved = write_folder(tmp_path / "checkpoints")
    for name in object_names.COMMITTED_NAMES:  # larger than the server's limit for these names
        (saved / name).write_bytes(os.urandom(object_names.MAX_COMMITTED_BYTES + 1))
        os.utime(saved / name, ns=(OLDEST, OLDEST))
    job = program_job(server_of_pods, {"checkpoints": PLACE}, program=Program.COMMAND)
    pod = store_in_pod(server_of_pods, job, submit(server_of_pods, job))
    publish(saved, pod, PLACE)
    assert read_folder(restore(pod, tmp_path / "other", PLACE)) == read_folder(saved)
    for text in "abc":
        (saved / "empty").write_text(text)
        publish(saved, pod, PLACE)
    assert len({uri.split("/")[5] for uri in pod.list(f"{PLACE}.index")}) == 2, "old states go with their times"
