"""The suite asks the network for nothing: pytest-socket (``addopts`` in pyproject.toml) closes every socket but loopback's.

It watches Python's sockets of this process. A program that a test starts is not watched: it gets ``HF_HUB_OFFLINE=1`` from
``tests/conftest.py``, with which nothing of ours asks for anything.
"""

from __future__ import annotations

import socket
import urllib.request

import pytest
import pytest_socket

CLOSED = (pytest_socket.SocketConnectBlockedError, UserWarning)  # warnings are errors here, and it warns before it raises
ELSEWHERE = ["192.0.2.1", "198.51.100.7", "2001:db8::1"]  # addresses for documentation (RFC 5737, RFC 3849)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_connection_elsewhere_raises_at_once(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client, pytest.raises(CLOSED, match=r"connect\(\) with host"):
        client.connect((host, 80))
    with pytest.raises(CLOSED, match=r"connect\(\) with host"):
        urllib.request.urlopen(f"http://[{host}]/" if ":" in host else f"http://{host}/", timeout=1)
