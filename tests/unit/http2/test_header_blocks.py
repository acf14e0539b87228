"""Header blocks beside hpack, which decodes ours, and whose blocks and errors are ours."""

from __future__ import annotations

from hpack import Decoder, Encoder, HPACKError
from hypothesis import example, given
from hypothesis import strategies as st

from ps_http2.header_blocks import MAX_QUICK_BYTES, HeaderBlocks
from ps_http2.stream import Headers

LIMIT = 64 * 1024

names = st.sampled_from([b":method", b":path", b"content-type", b"a", b"x" * 130])
values = st.sampled_from([b"", b"GET", b"/", b"b" * 126, b"b" * 127, b"b" * 300]) | st.binary(max_size=20)
header_lists = st.lists(st.tuples(names, values), max_size=8)


@given(st.lists(header_lists, max_size=4))
def test_hpack_decodes_our_blocks_and_so_do_we(sent: list[Headers]) -> None:
    ours, theirs = HeaderBlocks(LIMIT), Decoder(max_header_list_size=LIMIT)
    theirs.max_allowed_table_size = 0
    for headers in sent:
        block = ours.encode(headers)
        assert list(theirs.decode(block, raw=True)) == headers
        assert ours.decode(block) == headers


@given(st.lists(st.tuples(header_lists, st.booleans()), max_size=6))
def test_blocks_of_another_encoder_may_come_between_ours(sent: list[tuple[Headers, bool]]) -> None:
    """Theirs use the dynamic table and Huffman's code."""
    ours, theirs, receiver = HeaderBlocks(LIMIT), Encoder(), HeaderBlocks(LIMIT)
    ours.encode([])
    for headers, is_theirs in sent:
        block = theirs.encode(headers) if is_theirs else ours.encode(headers)
        assert receiver.decode(block) == headers


@example(
    b"\x10\x01a\x81\x1f" + b"\x10\x01a\x7c" + b"b" * 124
)  # `a` in Huffman's code, and as much as its first byte says
@given(st.binary(max_size=40) | st.lists(header_lists, max_size=2).map(lambda lists: b"".join(map(cut, lists))))
def test_any_bytes_are_decoded_or_refused_as_by_hpack(block: bytes) -> None:
    def decode(decoder: Decoder | HeaderBlocks) -> object:
        try:
            return list(decoder.decode(block, raw=True) if isinstance(decoder, Decoder) else decoder.decode(block))
        except HPACKError as error:
            return type(error)

    assert decode(HeaderBlocks(LIMIT)) == decode(Decoder(max_header_list_size=LIMIT))


def cut(headers: Headers) -> bytes:
    blocks = HeaderBlocks(LIMIT)
    blocks.encode([])
    return blocks.encode(headers)[:-1]


def test_no_quick_block_exceeds_the_limit_of_a_header_list() -> None:
    fields = [HeaderBlocks(LIMIT).decode(bytes([0x80 | index]))[0] for index in range(1, 62)]
    assert MAX_QUICK_BYTES * max(32 + len(name) + len(value) for name, value in fields) < LIMIT
