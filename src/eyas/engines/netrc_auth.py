"""What a server wants to know of us before it answers; it never is a setting, which files would show."""

import netrc
import os

import httpx


def from_netrc() -> httpx.Auth | None:
    """Return users and passwords by host, of ~/.netrc or the file that NETRC names, where there is one."""
    try:
        return httpx.NetRCAuth(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return None
