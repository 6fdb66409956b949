"""A run connects to nothing, and writes and prints no secret of its environment, also when it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from everyday import one_in
from run_helpers import ROOT, command_line

SECRETS = {
    name: f"planted-secret-{number}"
    for number, name in enumerate(
        "WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN"
        " GOOGLE_API_KEY AZURE_STORAGE_KEY GITHUB_TOKEN DATABASE_PASSWORD SLURM_JWT".split()
    )
}
START = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise PermissionError(f"{event} {arguments}")

sys.addaudithook(refuse)
import pretrain
sys.exit(pretrain.main())
"""


@pytest.mark.parametrize(
    ("changed", "exit_code"), one_in(2, [({}, 0), ({"--lr": "1e30", "--train-iters": "4"}, 1)])
)
def test_a_run_connects_to_nothing_and_keeps_secrets(
    tmp_path: Path, changed: dict[str, str | None], exit_code: int
) -> None:
    flags: dict[str, str | None] = {
        "--save": str(tmp_path), "--tensorboard-dir": str(tmp_path / "curves"), "--print-config": "full",
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", START, *command_line({**flags, **changed})], cwd=ROOT, env=os.environ | SECRETS,
        check=False, capture_output=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == exit_code, ended.stderr.decode()
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) > 3
    written |= {Path("stdout"): ended.stdout, Path("stderr"): ended.stderr}
    for path, content in written.items():
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path
