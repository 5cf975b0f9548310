"""The loader's parts that need no rights: reading the object, the helper's answers, sizes."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest

from stallscope.capture import loader
from stallscope.capture.bcc_helper import PROGRAM, Failure, inline
from stallscope.capture.object_loader import read_object
from stallscope.errors import CaptureProblem

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "probes" / "stallscope.bpf.c"
PER_HOOK = re.compile(r"(count|enter|return)_\d+$")
FOLDERS = [ROOT / "probes", ROOT / "native"]


def fake_python(folder: Path, body: str) -> str:
    """An interpreter that does something else than asked."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def without_bcc(folder: Path) -> str:
    code = 'import runpy, sys; sys.modules["bcc"] = None; sys.argv = sys.argv[2:]; '
    code += 'runpy.run_path(sys.argv[0], run_name="__main__")'
    return fake_python(folder, f"exec {sys.executable} -c '{code}' \"$@\"")


def test_maps_and_programs_come_from_the_object(bpf_object: Path) -> None:
    found = read_object(bpf_object)
    assert found.license == b"Dual BSD/GPL"
    assert found.maps["times"] == (2, 4, 664, 128 * 320, 0x400)  # array, mmapable
    assert found.maps["comms"] == (2, 4, 16, 16384, 1024)
    assert found.maps["bulk"] == (27, 0, 0, 1 << 24, 0)
    assert len(found.maps) == 22
    assert found.programs["on_exec"].section == "raw_tracepoint/sched_process_exec"
    assert {p.section for n, p in found.programs.items() if not n.startswith(("on_", "python_"))} == {
        "uprobe",
        "raw_tracepoint/sys_enter",
    }
    for program in found.programs.values():
        assert program.code and len(program.code) % 8 == 0
        # Each use is a 16-byte load instruction for one of the maps.
        assert all(program.code[at] == 0x18 and name in found.maps for at, name in program.map_uses)


def test_the_object_agrees_with_the_source(bpf_object: Path) -> None:
    """bcc finds its programs in the text, the object loader in the file."""
    text = inline(SOURCE, FOLDERS)
    sections = {name: section for section, name in PROGRAM.findall(text) if not PER_HOOK.match(name)}
    assert sections == {name: p.section for name, p in read_object(bpf_object).programs.items()}


def test_an_object_others_can_write_is_refused(bpf_object: Path, tmp_path: Path) -> None:
    path = tmp_path / "object.o"
    path.write_bytes(bpf_object.read_bytes())
    path.chmod(0o666)
    with pytest.raises(CaptureProblem, match="others could have written it"):
        read_object(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_an_object_of_somebody_else_is_refused(bpf_object: Path, tmp_path: Path) -> None:
    path = tmp_path / "object.o"
    path.write_bytes(bpf_object.read_bytes())
    os.chown(path, 1234, 0)
    with pytest.raises(CaptureProblem, match="uid 1234 owns it"):
        read_object(path)


def test_a_missing_object_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem, match="make build"):
        read_object(tmp_path / "none.o")
    with pytest.raises(CaptureProblem):
        read_object(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CaptureProblem):
        read_object(tmp_path / "fifo")


@pytest.mark.parametrize("keep", [0, 3, 63, 64, 1000, 100_000, 200_000])
def test_a_truncated_object_is_an_error(bpf_object: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "object.o"
    path.write_bytes(bpf_object.read_bytes()[:keep])
    with pytest.raises(CaptureProblem, match="damaged"):
        read_object(path)


def test_damaged_bytes_never_escape_as_other_errors(bpf_object: Path, tmp_path: Path) -> None:
    original, path = bpf_object.read_bytes(), tmp_path / "object.o"
    for at in range(0, len(original), len(original) // 150):
        broken = bytearray(original)
        broken[at : at + 8] = b"\xff" * 8
        path.write_bytes(broken)
        try:
            read_object(path)
        except CaptureProblem:
            continue


def test_inlining_names_what_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text('#include <linux/bpf.h>\n#include "nowhere.h"\n')
    with pytest.raises(Failure, match=r"nowhere\.h is in none of"):
        inline(source, [tmp_path])
    assert '#include "' not in inline(SOURCE, FOLDERS)


@pytest.mark.parametrize("size", [0, -4096, 4095, 12288, 1 << 31])
def test_impossible_ring_sizes(size: int) -> None:
    with pytest.raises(CaptureProblem, match="power of two"):
        loader.load("object", bulk_bytes=size)


def test_both_ways_failing_names_both(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem) as caught:
        loader.load(interpreters=["/nowhere/python"], object_file=tmp_path / "none.o")
    assert "bcc is not installed (/nowhere/python: No such file" in caught.value.why
    assert "none.o" in caught.value.why
    assert caught.value.hint


def test_no_bcc_in_any_interpreter(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem, match="bcc is not installed"):
        loader.load("bcc", interpreters=[without_bcc(tmp_path)])


def test_a_helper_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem, match="took too long"):
        loader.load("bcc", interpreters=[fake_python(tmp_path, "exec sleep 60")], seconds=0.2)


def test_a_helper_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem, match="ended without an answer"):
        loader.load("bcc", interpreters=[fake_python(tmp_path, "exit 1")])


def test_without_bcc_the_object_is_used_and_the_note_says_so(needs_bpf: None, bpf_object: Path, tmp_path: Path) -> None:
    before = open_descriptors()
    loaded = loader.load(interpreters=[without_bcc(tmp_path)], object_file=bpf_object)
    assert loaded.backend == "object"
    assert len(loaded.notes) == 1
    assert "bcc is not installed" in loaded.notes[0] and "the prebuilt object is used" in loaded.notes[0]
    loaded.close()
    loaded.close()
    assert open_descriptors() == before


@pytest.fixture
def broken_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "probes"
    shutil.copytree(ROOT / "probes", folder)
    monkeypatch.setattr(loader, "PROBES", folder)
    source = folder / "stallscope.bpf.c"
    source.write_text(source.read_text().replace("u32 d = r->depth;", "u32 d = r->no_such_member;", 1))


def test_what_clang_says_is_kept(needs_bpf: None, needs_bcc: None, broken_source: None, bpf_object: Path) -> None:
    with pytest.raises(CaptureProblem, match="no_such_member"):
        loader.load("bcc")
    loaded = loader.load(object_file=bpf_object)
    assert loaded.backend == "object"
    assert "bcc could not compile" in loaded.notes[0] and "no_such_member" in loaded.notes[0]
    assert "\n" not in loaded.notes[0] and len(loaded.notes[0]) < 400
    loaded.close()


def test_what_the_verifier_says_is_kept(
    needs_bpf: None, needs_bcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers EACCES, which must not be taken for missing rights."""
    monkeypatch.setattr(loader, "PROBES", tmp_path)
    shutil.copytree(ROOT / "probes" / "include", tmp_path / "include")
    (tmp_path / "stallscope.bpf.c").write_text(
        '#include "d.h"\nON("uprobe") int launch(void *c) { return *(int *)(c - 8); }\n'
    )
    (tmp_path / "d.h").write_text("#define ON(s)\n")
    with pytest.raises(CaptureProblem, match="invalid bpf_context access"):
        loader.load("bcc")


def test_a_refused_program_leaves_no_descriptor(
    needs_bpf: None, bpf_object: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stallscope.capture import object_loader

    monkeypatch.setattr(object_loader, "_with_maps", lambda program, maps: b"\0" * 16)
    before = open_descriptors()
    with pytest.raises(CaptureProblem, match=r"unknown opcode|Invalid argument"):
        loader.load("object", object_file=bpf_object)
    assert open_descriptors() == before


def test_the_helper_runs_without_our_packages() -> None:
    text = (ROOT / "agent" / "stallscope" / "capture" / "bcc_helper.py").read_text()
    assert "import stallscope" not in text and "from stallscope" not in text
    assert not stat.S_IMODE((ROOT / "probes").stat().st_mode) & stat.S_IWOTH
