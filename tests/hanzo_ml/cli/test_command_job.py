"""`hanzo-ml job submit` with a command: uploaded files, and one-line errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.command.workspace import restore_code
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from tests.support.cli.command_line import Cli, cli, file, refusal
from tests.support.cli.git_checkout import committed
from tests.support.folder_contents import read_folder, write_folder
from tests.support.server_process import ServerProcess

__all__ = ["cli", "file"]  # fixtures

File = Callable[..., Path]


def submit(cli: Cli, config: Path) -> dict[str, Any]:
    done = cli("job", "submit", "--config", str(config), "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_code_folder_round_trips_unchanged(cli: Cli, file: File, server: ServerProcess, tmp_path: Path) -> None:
    config = file("name: x\ncommand: [python, train.py]\ncode: ./src\n", "j.yaml")
    source = config.parent / "src"
    source.mkdir()
    write_folder(source)
    for path in (".hidden/.objects", ".objects/mine", "step-200/weights", "new\nline"):  # left out, or not a valid file name
        (source / path).unlink()
    (source / ".hidden").rmdir()
    (source / ".objects").rmdir()
    (source / "latin-1.py").write_bytes("# Gr\u00fc\u00dfe aus K\u00f6ln, mit freundlichen Empfehlungen".encode("latin-1"))
    (source / "absolute").symlink_to(source / "step-100")
    (source / "around").symlink_to("../src/step-100")
    done = cli("job", "submit", "--config", str(config), "--json")
    assert done.returncode == 0 and "left out" not in done.stderr, done.stderr
    code = Artifact.model_validate(json.loads(done.stdout)["config"]["code"])
    store = Store(server.settings.store)
    work = tmp_path / "work"
    (work / "code" / "empty").mkdir(parents=True)
    (work / "code" / "last").write_text("what an earlier attempt left in the place of a link")
    restore_code(store, code, tmp_path / "cache", work / "code")
    expected = read_folder(source)
    for link in ("absolute", "around"):
        assert (source / link).is_symlink()
        expected[link] = (*expected[link][:2], "step-100")
    assert read_folder(work / "code") == expected
    restore_code(store, code, tmp_path / "cache", work / "code")
    assert read_folder(work / "code") == expected, "a second attempt overwrites what is read-only"


def test_files_excluded_from_code_are_listed(cli: Cli, file: File) -> None:
    config = file("name: x\ncommand: [python, train.py]\ncode: ./src\n", "j.yaml")
    contents = {
        "train.py": b"1",
        ".env": b"KEY=1",
        ".git/config": b"",
        "deep/.cache/x": b"",
        "deep/__pycache__/t.pyc": b"\xff",
        "own-env/pyvenv.cfg": b"home = /usr",
        "node_modules/x.js": b"1",
        "deep/model.bin": bytes(range(256)),
        "two.bin": b"\xff\xfe",
    }
    for path, data in contents.items():
        source = config.parent / "src" / path
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_bytes(data)
    (config.parent / "src" / "venv").symlink_to("/usr")
    done = cli("job", "submit", "--config", str(config))
    assert done.returncode == 0 and "queued" in done.stdout
    assert done.stderr.splitlines() == [
        "left out of code: ./src",
        "  hidden: .env, .git/, deep/.cache/",
        "  generated: deep/__pycache__/",
        "  binary: deep/model.bin, two.bin",
        "  environment: node_modules/, own-env/, venv",
    ]


@pytest.mark.parametrize("target", ["/etc/hosts", "../j.yaml", "..", "/nowhere", "deep/../../j.yaml"])
def test_link_leaving_the_code_folder_is_refused(cli: Cli, file: File, target: str) -> None:
    config = file("name: x\ncommand: [python, train.py]\ncode: ./src\n", "j.yaml")
    (config.parent / "src" / "deep").mkdir(parents=True)
    (config.parent / "src" / "secret").symlink_to(target)
    said = refusal(cli("job", "submit", "--config", str(config)))
    assert "src/secret is a link that leaves the folder" in said and target in said


def code_of(server: ServerProcess, job: dict[str, Any]) -> dict[str, str]:
    store, uri = Store(server.settings.store), job["config"]["code"]["uri"]
    files = [found for found in store.list(uri) if not found.endswith("/manifest.json")]
    return {found.removeprefix(uri + "/"): store.get_bytes(found).decode() for found in files}


@pytest.mark.requirement("S1")
def test_files_named_by_the_command_are_included_in_the_code(cli: Cli, file: File, server: ServerProcess) -> None:
    file("print(1)\n", "train.py")
    file("not asked for", "other.py")
    job = submit(
        cli, file("name: x\ncommand: [torchrun, --nproc_per_node=2, train.py, ../train.py, /etc/hosts]\n", "j.yaml")
    )
    assert code_of(server, job) == {"train.py": "print(1)\n"}
    assert job["config"]["command"] == ["torchrun", "--nproc_per_node=2", "train.py", "../train.py", "/etc/hosts"]


def test_code_snapshot_excludes_generated_files(cli: Cli, file: File, server: ServerProcess) -> None:
    config = file("name: x\ncommand: [python, train.py]\ncode: ./src\n", "j.yaml")
    for path in ("train.py", "parts/words.py", "__pycache__/train.pyc", ".git/config", ".env"):
        source = config.parent / "src" / path
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_bytes(b"\xff" if path.endswith(".pyc") else path.encode())
    job = submit(cli, config)
    assert code_of(server, job) == {"train.py": "train.py", "parts/words.py": "parts/words.py"}
    assert "code" in job["config"] and job["config"]["code"]["kind"] == "code"


def test_single_code_file_is_included(cli: Cli, file: File, server: ServerProcess) -> None:
    file("print(1)\n", "train.py")
    assert code_of(server, submit(cli, file("name: x\ncommand: [python, train.py]\ncode: train.py\n", "j.yaml")))


def test_run_records_the_git_commit_of_its_code(cli: Cli, file: File, server: ServerProcess) -> None:
    def commit_of_run(config: Path) -> object:
        run = httpx.get(f"{server.url}/v1/runs/{submit(cli, config)['id']}", trust_env=False).json()
        return run["git_commit"]

    config = file("name: x\ncommand: [python, train.py]\n", "j.yaml")
    commit = committed(file("print(1)\n", "train.py").parent)
    assert commit_of_run(config) == commit
    (config.parent / ".git").rename(config.parent / "no-git")
    assert commit_of_run(config) is None, "it lies in no checkout"


BAD = {
    "name: x\ncommand: [python, train.py]\ncode: ./nowhere\n": "check `code:`",
    "name: x\ncommand: [python, train.py]\ncode: [a]\n": "must be a file or folder",
    "name: x\ncommand: [python, data.bin]\n": "data.bin is not a text file",
    "name: x\ncommand: python train.py\n": "command",
    "name: x\ncommand: [python, 3]\n": "command[1]",
    "command: [python]\n": "name",
    "name: x\ncommand: [python]\nenv: {WHEN: 2026-01-01}\n": "env",
    "name: x\ncommand: [python]\nschedule: {max_duration: 3}\n": "schedule.max_duration",
}


@pytest.mark.parametrize("text", BAD)
def test_invalid_job_file_is_refused_in_one_line_naming_the_key(cli: Cli, file: File, text: str) -> None:
    file(b"\xff\xfe", "data.bin")
    assert BAD[text] in refusal(cli("job", "submit", "--config", str(file(text, "j.yaml"))))


@pytest.mark.parametrize("option", [["--model", "m"], ["--set", "max_steps=3"]])
def test_recipe_options_are_refused_for_a_command_job(cli: Cli, file: File, option: list[str]) -> None:
    config = file("name: x\ncommand: [python]\n", "j.yaml")
    assert "neither --model nor --set" in refusal(cli("job", "submit", "--config", str(config), *option))


def test_submit_help_documents_the_checkpoint_folder(cli: Cli) -> None:
    assert "HANZO_ML_CHECKPOINTS" in cli("job", "submit", "--help").stdout
