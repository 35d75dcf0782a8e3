"""Streaming of text: whole characters, stop strings wherever they end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.text import TextStream


def decode(ids):
    """A byte-level tokenizer: token = byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def run(text, stop=(), every=1):
    """Streams the bytes of a text; returns (stream, increments, bytes pushed)."""
    stream, parts, data = TextStream(decode, stop), [], text.encode()
    for count, byte in enumerate(data, 1):
        if stream.push(byte):
            break
        if count % every == 0:
            parts.append(stream.take(all=False))
    stream.finish()
    parts.append(stream.take(all=True))
    return stream, parts, count


@settings(deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=20), st.integers(1, 5))
def test_increments_join_to_the_text(text, every):
    stream, parts, _ = run(text, every=every)
    assert "".join(parts) == stream.text == text


@settings(deadline=None, derandomize=True)
@given(
    st.text(alphabet="abé", min_size=1, max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=2),
)
def test_text_ends_before_the_first_stop_string_to_complete(text, stop):
    stream, parts, pushed = run(text, stop)
    ends = [
        end for end in range(1, len(text) + 1) if any(text[:end].endswith(word) for word in stop)
    ]
    assert stream.stopped == bool(ends)
    if ends:
        seen = text[: ends[0]]
        longest = max((word for word in stop if seen.endswith(word)), key=len)
        assert stream.text == seen[: len(seen) - len(longest)]
        assert pushed == len(seen.encode())
    assert "".join(parts) == stream.text


def test_a_possible_stop_string_is_held_back():
    stream = TextStream(decode, ["\n\n"])
    for byte in b"a\n":
        stream.push(byte)
    assert stream.take(all=False) == "a"
    stream.push(ord("b"))
    assert stream.take(all=False) == "\nb"


@pytest.mark.parametrize("tail", [b"\xc3", b"\xe2\x82"])
def test_half_a_character_shows_only_at_the_end(tail):
    stream = TextStream(decode)
    for byte in b"x" + tail:
        stream.push(byte)
    assert stream.take(all=False) == "x"
    stream.finish()
    assert stream.take(all=True) == decode(tail)
