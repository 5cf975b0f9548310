"""Frames: bytes in, frames out, however they are cut."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallscope.wire.frames import (
    FILE_HEADER_BYTES,
    MAX_FRAME_BYTES,
    BadFrame,
    Decoder,
    Frame,
    Kind,
    encode,
    file_header,
    read_file_header,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
FRAMES = st.lists(
    st.tuples(st.sampled_from(Kind), st.dictionaries(st.text(max_size=8), VALUES, max_size=4)), max_size=6
)


def test_the_example_of_the_docstring() -> None:
    data = encode(Kind.TICK, {"at_ns": 5})
    assert data == bytes.fromhex("08000000 0e00 0000 81 a5 61745f6e73 05")
    assert list(Decoder().feed(data)) == [Frame(Kind.TICK, {"at_ns": 5})]


@given(FRAMES, st.integers(1, 50))
def test_any_cut_gives_the_same_frames(frames: list[tuple[Kind, dict]], step: int) -> None:
    data = b"".join(encode(kind, body) for kind, body in frames)
    decoder, got = Decoder(offset=32), []
    for i in range(0, len(data), step):
        got += decoder.feed(data[i : i + step])
    assert got == [Frame(kind, body) for kind, body in frames]
    assert (decoder.pending, decoder.offset) == (0, 32 + len(data))


@pytest.mark.parametrize(("data", "why"), [
    (b"\xff\xff\xff\xff\x01\x00\x00\x00", "impossible frame head"),
    (b"\x01\x00\x00\x00\x01\x00\x01\x00\x80", "impossible frame head"),
    (b"\x01\x00\x00\x00\x01\x00\x00\x00\x90", "no map"),
    (b"\x01\x00\x00\x00\x01\x00\x00\x00\xc1", "no msgpack"),
    (b"\x02\x00\x00\x00\x01\x00\x00\x00\x80\x80", "no msgpack"),
    (b"\x05\x00\x00\x00\x01\x00\x00\x00\xdf\xff\xff\xff\xff", "no msgpack"),
    (b"\xe8\x03\x00\x00\x01\x00\x00\x00" + b"\x91" * 1000, "no msgpack"),
])  # fmt: skip
def test_bytes_that_are_no_frame(data: bytes, why: str) -> None:
    good = encode(Kind.TICK, {"at_ns": 1})
    got = []
    with pytest.raises(BadFrame) as caught:
        for frame in Decoder(offset=32).feed(good + data):
            got.append(frame)
    assert len(got) == 1 and why in caught.value.why and caught.value.offset == 32 + len(good)


def test_a_frame_too_large_to_send() -> None:
    with pytest.raises(ValueError, match="frame of"):
        encode(Kind.EVENTS, {"data": bytes(MAX_FRAME_BYTES)})


def test_file_header() -> None:
    assert len(file_header()) == FILE_HEADER_BYTES == 32
    assert read_file_header(file_header(3, 4)) == (1, 1, 32)
    for bad in (b"", file_header()[:31], b"X" + file_header()[1:]):
        with pytest.raises(BadFrame):
            read_file_header(bad)


def test_maps_with_other_keys() -> None:
    payload = msgpack.packb({1: 2})
    with pytest.raises(BadFrame):
        list(Decoder().feed(len(payload).to_bytes(4, "little") + b"\x0e\0\0\0" + payload))
