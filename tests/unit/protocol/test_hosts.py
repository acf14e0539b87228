from __future__ import annotations

import pytest

from ps_config.hosts import check_listening, is_ip_literal, split_port


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_nothing(host: str) -> None:
    check_listening(host, has_tokens=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "some-name", "localhost.example.com"])
def test_beyond_loopback_needs_tokens_or_courage(host: str) -> None:
    check_listening(host, has_tokens=True, insecure=False)
    check_listening(host, has_tokens=False, insecure=True)
    with pytest.raises(ValueError, match=r"gradpost token create --dir DIR.* GRADPOST_INSECURE=true"):
        check_listening(host, has_tokens=False, insecure=False)


@pytest.mark.parametrize(
    ("authority", "parts"),
    [
        ("", ("", "")),
        ("a", ("a", "")),
        ("A.Example.:80", ("a.example", "80")),
        ("[::1]", ("::1", "")),
        ("[::1]:7070", ("::1", "7070")),
        ("127.0.0.1:1", ("127.0.0.1", "1")),
    ],
)
def test_host_and_port(authority: str, parts: tuple[str, str]) -> None:
    assert split_port(authority) == parts


@pytest.mark.parametrize("host", ["1", "127.1", "0x7f.1", "127.0.0.1.example.com", ""])
def test_what_a_resolver_may_answer_for_is_no_address(host: str) -> None:
    assert not is_ip_literal(host)
