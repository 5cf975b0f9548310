"""The manifests against Kubernetes' schema, and the Slurm examples as Slurm would run them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from root_kit import ROOT

MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
VERSIONS = ("1.29", "1.32", "1.35")  # sidecars as init containers are from 1.29 on


def documents() -> list[tuple[str, dict[str, Any]]]:
    yaml = pytest.importorskip("yaml", reason="pip install stallscope[dev]")
    return [(path.name, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_schema(version: str) -> None:
    """Strictly: a key that Kubernetes does not know is an error, too."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install stallscope[dev]")
    for _name, document in documents():
        validator.validate(document, version, strict=True)


def test_the_schema_finds_what_is_wrong() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install stallscope[dev]")
    (pod,) = [document for name, document in documents() if name == "sidecar.yaml"]
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(validator.ValidationError):
        validator.validate(pod, VERSIONS[0], strict=True)


def test_rights_of_the_manifests() -> None:
    """The sidecar has none, the daemon those of its page; nobody has a token of the API server, or a role."""
    found = dict(documents())
    assert not {document["kind"] for _, document in documents()} & {"Role", "ClusterRole", "ClusterRoleBinding"}
    pod = found["sidecar.yaml"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    for container in pod["initContainers"]:
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]} and context["readOnlyRootFilesystem"]
        assert context["allowPrivilegeEscalation"] is False
    daemon = found["daemonset.yaml"]["spec"]["template"]["spec"]
    (container,) = daemon["containers"]
    added = set(container["securityContext"]["capabilities"]["add"])
    assert added == {"BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH", "SETUID", "SETGID"}
    assert "privileged" not in container["securityContext"]


def prolog(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    library = tmp_path / "libstallscope.so"
    library.touch()
    base = {"PATH": os.environ["PATH"], "STALLSCOPE_LIBRARY": str(library), "SLURM_JOB_ID": str(os.getpid()) + "777"}
    words = [ROOT / "deploy/slurm/prolog.sh"]
    return subprocess.run(words, env={**base, **env}, capture_output=True, text=True)


def test_slurm(tmp_path: Path) -> None:
    """Nothing for who did not ask; two variables and a folder for who did, gone with the job."""
    assert prolog(tmp_path).stdout == ""
    assert prolog(tmp_path, STALLSCOPE="1", STALLSCOPE_LIBRARY="/none").stdout == ""
    job = str(os.getpid()) + "777"
    folder = Path(f"/dev/shm/stallscope-{job}")
    try:
        for _ in range(2):  # two tasks of a node
            done = prolog(tmp_path, STALLSCOPE="1", LD_PRELOAD_="")
            assert done.returncode == 0
            assert done.stdout.splitlines() == [
                f"export LD_PRELOAD={tmp_path}/libstallscope.so", f"export STALLSCOPE_SHIM=dir:{folder}",
            ]  # fmt: skip
        assert folder.stat().st_mode & 0o777 == 0o700
        subprocess.run(
            [ROOT / "deploy/slurm/epilog.sh"], env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": job}, check=True
        )
        assert not folder.exists()
    finally:
        if folder.exists():
            folder.rmdir()
    hostile = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "../tmp"}
    assert subprocess.run([ROOT / "deploy/slurm/epilog.sh"], env=hostile, check=True).returncode == 0
