"""A run connects to nothing, and writes and prints no secret of its environment, also when it fails."""

import os
import sys
from pathlib import Path

import pytest
from everyday import one_in
from forked_job import ForkedJob
from run_helpers import command_line

SECRETS = {
    name: f"planted-secret-{number}"
    for number, name in enumerate(
        "WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN"
        " GOOGLE_API_KEY AZURE_STORAGE_KEY GITHUB_TOKEN DATABASE_PASSWORD SLURM_JWT".split()
    )
}


def refuse(event: str, arguments: object) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise PermissionError(f"{event} {arguments}")


def plant(_: int) -> None:
    """Start without a launcher, with secrets, where no connection is possible."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= SECRETS
    sys.addaudithook(refuse)


@pytest.mark.parametrize(
    ("changed", "exit_code"), one_in(2, [({}, 0), ({"--lr": "1e30", "--train-iters": "4"}, 1)])
)
def test_a_run_connects_to_nothing_and_keeps_secrets(
    tmp_path: Path, changed: dict[str, str | None], exit_code: int
) -> None:
    save = tmp_path / "run"
    flags: dict[str, str | None] = {
        "--save": str(save), "--tensorboard-dir": str(save / "curves"), "--print-config": "full",
    }  # fmt: skip
    job = ForkedJob(command_line({**flags, **changed}), 1, tmp_path, plant)
    job.wait()
    assert job.exit_codes == {0: exit_code}, job.output(0)
    assert job.output(0)
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(save in path.parents for path in written) > 3
    for path, content in written.items():
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path
