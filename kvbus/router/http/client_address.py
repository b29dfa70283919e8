"""Which client a request is from: its address, and whose turn it takes in the queue. Pure.

The one rule: nobody gets more turns by sending another header. An API key counts only where somebody checks it: engines
that want one, or a trusted proxy in front of the router. Of addresses, too, only a trusted proxy is believed.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence

from multidict import MultiMapping

from kvbus.errors import ConfigError

FORWARDED_FOR = "X-Forwarded-For"


class Clients:
    """See the module's docstring.

    Args:
        proxies: addresses and networks, such as ``10.0.0.0/8``.

    Raises:
        ConfigError: one of them is neither.
    """

    def __init__(self, proxies: Sequence[str] = ()) -> None:
        self._proxies = [_network(each) for each in proxies]

    def address(self, headers: MultiMapping[str], remote: str | None) -> str:
        """The client's, as far as it is known: the last one in ``X-Forwarded-For`` that is no trusted proxy."""
        address = remote or ""
        hops = [each.strip() for line in headers.getall(FORWARDED_FOR, ()) for each in line.split(",")]
        while hops and self._is_proxy(address) and _parse(hops[-1]) is not None:
            address = hops.pop()
        return address

    def payer(self, headers: MultiMapping[str], remote: str | None, *, keys_checked: bool) -> str:
        """Whose turn a request takes: that of its API key (hashed) if somebody checks it, else of its address.

        Args:
            keys_checked: the engines refuse keys that they do not know.
        """
        key = headers.get("Authorization") or headers.get("x-api-key")
        if key and (keys_checked or self._is_proxy(remote or "")):
            return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).hexdigest()
        return self.address(headers, remote)

    def _is_proxy(self, address: str) -> bool:
        parsed = _parse(address)
        return parsed is not None and any(parsed in network for network in self._proxies)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _parse(text: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError("--trusted-proxy", text, "an address, or a network such as 10.0.0.0/8") from None
