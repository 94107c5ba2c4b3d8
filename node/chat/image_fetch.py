"""Fetches images that a request has as an address, where the node's owner allows it.

A client chooses the address, so the node could be made to ask hosts that only it can reach. Every
address of the host must be public, the connection goes to one that was checked, and redirects are
checked like the first address.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from ...placement.errors import InvalidRequest, UnsupportedParameter
from .images import MAX_IMAGE_BYTES
from .requests import GenerationRequest, Image

if TYPE_CHECKING:
    import httpx2

WITHIN_S: Final = 20.0
"""The limit for all images of a request."""
_TOGETHER: Final = 4
_REDIRECTS: Final = 3
_PUBLIC: Final = ipaddress.IPv6Network("2000::/3")
"""The IPv6 addresses that IANA has released for the public internet."""
_SPECIAL: Final = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
"""Blocks of it for protocols and documentation."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is reachable for everybody, so that no client gains by our request."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.is_global and not parsed.is_multicast
    if embedded := _ipv4_in(parsed):
        return all(is_public(str(each)) for each in embedded)
    return parsed in _PUBLIC and not any(parsed in each for each in _SPECIAL)


def _ipv4_in(address: ipaddress.IPv6Address) -> Sequence[ipaddress.IPv4Address]:
    """The IPv4 addresses that a packet to it may reach: mapped, by NAT64, 6to4 or Teredo."""
    nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
    embedded = (address.ipv4_mapped, nat64, address.sixtofour, *(address.teredo or ()))
    return [each for each in embedded if each is not None]


class ImageFetcher:
    """One for a node."""

    def __init__(
        self,
        *,
        is_allowed: bool,
        may_ask: Callable[[str], bool] = is_public,
        within_s: float = WITHIN_S,
    ) -> None:
        """`may_ask`: whether an IP address may be asked."""
        self._within_s = within_s
        self._is_allowed = is_allowed
        self._may_ask = may_ask

    async def fetched(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the bytes of all images. Raises InvalidRequest, UnsupportedParameter."""
        missing = [image for image in request.images if image.url]
        if not missing:
            return request
        if not self._is_allowed:
            raise UnsupportedParameter(
                f"'{missing[0].field}' is an address, and this node fetches no images; send a data "
                "URL, or the node's owner may set EXO_IMAGE_URLS=1",
                param=missing[0].field,
            )
        import httpx2

        slots = asyncio.Semaphore(_TOGETHER)

        async def fetch(image: Image) -> Image:
            if not image.url:
                return image
            async with slots:
                return await self._fetch(client, image)

        try:
            async with (
                asyncio.timeout(self._within_s),
                httpx2.AsyncClient(trust_env=False) as client,
            ):
                images = await asyncio.gather(*map(fetch, request.images))
        except TimeoutError:
            raise _refused(missing[0], f"did not arrive within {self._within_s:g} s") from None
        return replace(request, images=tuple(images))

    async def _fetch(self, client: "httpx2.AsyncClient", image: Image) -> Image:
        import httpx2

        url = image.url
        for _ in range(_REDIRECTS + 1):
            parts = _split(url, image)
            address = await self._address(parts, image)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            host = f"[{address}]" if ":" in address else address
            target = f"{parts.scheme}://{host}:{port}{parts.path or '/'}"
            target += f"?{parts.query}" if parts.query else ""
            headers = {"Host": parts.netloc.rpartition("@")[2], "Accept": "image/*"}
            try:
                async with client.stream(
                    "GET", target, headers=headers, extensions={"sni_hostname": parts.hostname}
                ) as response:
                    if response.is_redirect:
                        url = urljoin(url, response.headers.get("location", ""))
                        continue
                    return await _read(response, image)
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as fault:
                raise _refused(image, f"could not be fetched ({type(fault).__name__})") from None
        raise _refused(image, f"is redirected more than {_REDIRECTS} times")

    async def _address(self, parts: SplitResult, image: Image) -> str:
        """An IP address of the host, all of which may be asked."""
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, None, type=socket.SOCK_STREAM
            )
        except (OSError, ValueError):  # the latter: the host has a NUL, or is no name of a host
            raise _refused(image, "names a host that is not found") from None
        addresses = [str(entry[4][0]).partition("%")[0] for entry in entries]
        if not addresses or not all(map(self._may_ask, addresses)):
            raise _refused(image, "is on a private network; send it as a data URL")
        return addresses[0]


async def _read(response: "httpx2.Response", image: Image) -> Image:
    if response.status_code != 200:
        raise _refused(image, f"was answered with status {response.status_code}")
    media_type = response.headers.get("content-type", "").partition(";")[0].strip()
    if not media_type.startswith("image/"):
        raise _refused(image, f"is of type {media_type[:64] or 'unknown'}, which is no image")
    data = bytearray()
    async for chunk in response.aiter_bytes():
        data += chunk
        if len(data) > MAX_IMAGE_BYTES:
            raise _refused(image, f"is longer than {MAX_IMAGE_BYTES // 10**6} MB")
    return replace(image, data=bytes(data), media_type=media_type, url="")


def _split(url: str, image: Image) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _refused(image, "is no valid address") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refused(image, "is no http or https address")
    return parts


def _refused(image: Image, why: str) -> InvalidRequest:
    """The address stays out of the message: it may hold a secret, and errors are logged."""
    return InvalidRequest(f"the image of '{image.field}' {why}", param=image.field)
