"""Which variables may be read, and that nothing which looks like a secret is told."""

from __future__ import annotations

import time

import pytest

from stallscope.wire.environment import CUT, MAX_NAMES, MAX_READ, MAX_VALUE, is_wanted, shown, wanted
from stallscope.wire.secrets import words_without_secrets


@pytest.mark.parametrize("name", [
    "TRACEPARENT", "OTEL_RESOURCE_ATTRIBUTES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "POD_NAME",
    "OMPI_COMM_WORLD_RANK", "NCCL_DEBUG", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "CUDA_VISIBLE_DEVICES",
])  # fmt: skip
def test_wanted_names(name: str) -> None:
    assert is_wanted(name)


@pytest.mark.parametrize("name", [
    "PATH", "HOME", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_API_KEY", "SLURM_JWT", "NCCL_TOKEN",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY", "SLURM_PASSWORD", "CUDA_SECRET", "RANK_", "XRANK", "rank", "NCCL_\n", "", "NCCL_É",
    "OTEL_" + "A" * 100,
])  # fmt: skip
def test_names_that_are_not_read(name: str) -> None:
    assert not is_wanted(name)


@pytest.mark.parametrize(("value", "told"), [
    ("service.name=train,host.id=7", "service.name=train,host.id=7"),
    ("https://user:pw@collector:4317/v1", f"https://{CUT}@collector:4317/v1"),
    ("http://u:p@a,http://v:q@b", f"http://{CUT}@b"),
    ("service.name=a,api.key=hunter2,x=1", f"service.name=a,api.key={CUT},x=1"),
    ("Authorization: Bearer abc.def", f"Authorization: {CUT}"),
    ("authorization=Basic%20YWJj", f"authorization={CUT}"),
    ("author=me,authority=x", "author=me,authority=x"),
    ("a ghp_0123456789abcdef b", f"a {CUT} b"),
    ("eyJhbGciOi.eyJzdWIi.abc", CUT),
    ("args=--password=hunter2", f"args=--password={CUT}"),
    ("run --token hunter2 -x 1", f"run --token {CUT} -x 1"),
    ("conn=Server%3Dx%3BPassword%3Dhunter2", f"conn=Server=x;Password={CUT}"),
    ("a%253Dpassword%253Dhunter2", f"a=password={CUT}"),
    ("u=https%3A%2F%2Fme%3Ahunter2%40collector", f"u=https://{CUT}@collector"),
    ("https://acc.blob/x?sv=1&sig=hunter2", f"https://acc.blob/x?sv=1&sig={CUT}"),
    ('{"api_key": "hunter2 and 3", "x": 1}', f'{{"api_key": {CUT}, "x": 1}}'),
    ("pw='hunter2 hunter3'", f"pw={CUT}"), ("x.pass=hunter2", f"x.pass={CUT}"), ("PASSWORD hunter2", f"PASSWORD {CUT}"),
    ("me:hunter2@host:4317", f"{CUT}@host:4317"), ("nginx:1.2@sha256:abc", "nginx:1.2@sha256:abc"),
    ("nvapi-0123456789", CUT), ("50%,max_tokens=7,tokenizer=x%20y", "50%,max_tokens=7,tokenizer=x%20y"),
    ("task-runner-0123456789", "task-runner-0123456789"),
    ("asia-northeast1-b", "asia-northeast1-b"),
    ("INFO", "INFO"), ("a\x1b[31mb\x00", "a?[31mb?"),
    ("x" * 1000, "x" * MAX_VALUE), ("x" * (MAX_READ + 1), CUT),
])  # fmt: skip
def test_values(value: str, told: str) -> None:
    assert shown(value) == told


@pytest.mark.parametrize(("words", "told"), [
    ("curl -H X-Api-Key:hunter2 https://me:hunter2@h/", f"curl -H X-Api-Key:{CUT} https://{CUT}@h/"),
    ("job --api-key hunter2 --lr 1", f"job --api-key {CUT} --lr 1"),
    ("job --token --lr 1 --password=hunter2", f"job --token --lr 1 --password={CUT}"),
    ("train.py --tokenizer-path /t --max-tokens 4096 --num-key-value-heads 8 --author me --keyboard x",) * 2,
    ("python3 -c spawn_main(tracker_fd=5,pipe_handle=7) --multiprocessing-fork",) * 2,
])  # fmt: skip
def test_words_of_a_command_line(words: str, told: str) -> None:
    assert words_without_secrets(words.split()) == told.split()


def test_hostile_values_take_no_time() -> None:
    """A pattern that goes back and forth over 4 kB of a target's choosing would hold the capture up."""
    begin = time.monotonic()
    for piece in (
        "a",
        "key",
        "key=",
        "://",
        "@",
        "sk-",
        "bearer ",
        "-----BEGIN",
        "a:",
        "a:b",
        "'",
        "key '",
        "%25",
        "%3D",
        "key ",
        "--key ",
        "ey",
        "= ",
        "%20",
        "\n",
    ):
        shown(piece * (MAX_READ // len(piece)))
    assert time.monotonic() - begin < 5


def test_words_of_a_block() -> None:
    words = [b"RANK=1", b"RANK=2", b"NOEQUALS", b"=x", b"", b"NCCL_DEBUG=W\xff", b"PATH=/bin", b"OTEL_TOKEN=t"]
    assert wanted(words) == {"RANK": "1", "NCCL_DEBUG": "W\ufffd"}
    assert len(wanted([b"NCCL_%d=x" % n for n in range(1000)])) == MAX_NAMES
