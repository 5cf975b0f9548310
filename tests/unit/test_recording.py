"""Recordings: whole, cut anywhere, too new, on a full disk, and where they may be written."""

from __future__ import annotations

import io
import os
import stat
import struct
from pathlib import Path

import pytest
from aggregate_kit import small

from stallscope.cli.report import replay
from stallscope.diagnose.incident import Found
from stallscope.errors import RecordingProblem
from stallscope.output.finish import finish
from stallscope.output.report import report_json
from stallscope.wire.frames import FILE_HEADER_BYTES, Frame, Kind, encode, file_header
from stallscope.wire.recording import Recorder, open_output, read_recording


def write(path: Path, frames: list[bytes]) -> Path:
    recorder = Recorder(open_output(str(path), force=False, uid=os.getuid(), gid=os.getgid()))
    for frame in frames:
        recorder.write(frame)
    recorder.close()
    assert recorder.problem is None and recorder.written == path.stat().st_size
    return path


def test_replay_is_the_live_report(tmp_path: Path) -> None:
    kit = small()
    path = write(tmp_path / "a.rec", kit.encoded())
    state = replay(str(path)).state
    assert state.ending is None
    assert report_json(state, Found()) == report_json(kit.state(), Found())


def test_cut_at_every_byte(tmp_path: Path) -> None:
    frames = small().encoded()
    ends = [FILE_HEADER_BYTES]
    for frame in frames:
        ends.append(ends[-1] + len(frame))
    data = file_header() + b"".join(frames)
    path = tmp_path / "cut.rec"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size < FILE_HEADER_BYTES:
            with pytest.raises(RecordingProblem, match="shorter than a file header"):
                read_recording(str(path))
            continue
        recording = read_recording(str(path))
        whole = sum(end <= size for end in ends) - 1
        assert len(list(recording)) == whole
        assert recording.ending is not None and recording.ending.bad is None
        assert (recording.ending.offset, recording.ending.pending) == (ends[whole], size - ends[whole])
        if whole == 0:
            with pytest.raises(RecordingProblem, match="no whole frame"):
                replay(str(path))
        elif size % 37 == 0 or size in ends:
            out, err = io.StringIO(), io.StringIO()
            state = replay(str(path)).state
            finish(state, Found(), as_json=True, out=out, err=err)
            finish(state, Found(), as_json=False, out=out, err=err)
            assert f"ends at byte {ends[whole]}" in out.getvalue()


def test_garbage_in_the_middle(tmp_path: Path) -> None:
    frames = small().encoded()
    path = write(tmp_path / "bad.rec", [*frames[:5], b"\xff" * 64, *frames[5:]])
    state = replay(str(path)).state
    at = FILE_HEADER_BYTES + sum(map(len, frames[:5]))
    assert state.dropped is not None and f"at byte {at}" in state.dropped
    assert '"name": "python3"' in report_json(state, Found())


@pytest.mark.parametrize("data", [b"", b"\x7fELF" + bytes(100), b"STALLSCP"])
def test_no_recording(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(RecordingProblem, match="next: "):
        try:
            read_recording(str(path))
        except RecordingProblem as problem:
            raise RecordingProblem(str(problem), why="", hint="") from problem


def test_newer_recording_names_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "new.rec"
    path.write_bytes(struct.pack("<8sHHIQQ", b"STALLSCP", 9, 7, 32, 0, 0))
    with pytest.raises(RecordingProblem) as caught:
        read_recording(str(path))
    assert "version 9" in caught.value.why and "version 7" in caught.value.why and caught.value.hint


def test_newer_but_readable(tmp_path: Path) -> None:
    frames = small().encoded()
    later = struct.pack("<IHH", 1, 4711, 0) + b"\x80"
    path = tmp_path / "new.rec"
    path.write_bytes(
        struct.pack("<8sHHIQQ", b"STALLSCP", 9, 1, 40, 1, 1) + bytes(8) + frames[0] + later + b"".join(frames[1:])
    )
    state = replay(str(path)).state
    assert state.complete and state.unknown_kinds == 1
    assert "1 frames of a kind" in report_json(state, Found())


def test_missing_folder_fifo_and_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "fifo"):
        with pytest.raises(RecordingProblem):
            read_recording(str(path))
    with pytest.raises(RecordingProblem):
        open_output(str(tmp_path / "nothing" / "x"), force=True, uid=os.getuid(), gid=os.getgid())
    with pytest.raises(RecordingProblem):
        read_recording("nul\0byte")


def test_full_disk_stops_only_the_recording() -> None:
    recorder = Recorder(os.open("/dev/full", os.O_WRONLY))
    recorder.write(b"x" * 100)
    recorder.close()
    assert recorder.problem is not None and "No space left" in recorder.problem and recorder.written == 0


def test_output_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out"
    os.close(open_output(str(path), force=False, uid=os.getuid(), gid=os.getgid()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"precious")
    with pytest.raises(RecordingProblem, match="cannot write") as caught:
        open_output(str(path), force=False, uid=os.getuid(), gid=os.getgid())
    assert "--force" in caught.value.hint and path.read_bytes() == b"precious"
    os.close(open_output(str(path), force=True, uid=os.getuid(), gid=os.getgid()))
    assert path.read_bytes() == b""


@pytest.mark.parametrize("force", [False, True])
def test_links_and_devices_are_refused(tmp_path: Path, force: bool) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(precious)
    os.mkfifo(tmp_path / "fifo")
    for path in (link, tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(RecordingProblem):
            open_output(str(path), force=force, uid=os.getuid(), gid=os.getgid())
    assert precious.read_bytes() == b"x"


def test_with_the_rights_of_the_caller(tmp_path: Path, needs_root: None) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    with pytest.raises(RecordingProblem, match="cannot write") as caught:
        open_output(str(tmp_path / "x"), force=False, uid=65534, gid=65534)
    assert "denied" in caught.value.why
    assert os.geteuid() == 0 and os.getegid() == os.getgid()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    os.close(open_output(str(theirs / "x"), force=False, uid=65534, gid=65534))
    assert ((theirs / "x").stat().st_uid, (theirs / "x").stat().st_gid) == (65534, 65534)


def test_frames_after_the_farewell_do_not_count(tmp_path: Path) -> None:
    kit = small()
    extra = encode(Kind.NOTE, {"at_ns": 1, "proc": None, "text": "late"})
    path = write(tmp_path / "a", [*kit.encoded(), extra, b"\xff" * 40])
    assert report_json(replay(str(path)).state, Found()) == report_json(kit.state(), Found())
    state = kit.state()
    state.apply(Frame(Kind.NOTE, {"at_ns": 1, "proc": None, "text": "late"}))
    assert state.notes == [(1, "a note")]
