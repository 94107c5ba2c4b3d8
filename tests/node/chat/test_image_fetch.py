"""Images by address: fetched where the owner allows it, from public addresses, within limits."""

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from exo_node.mtp.types import Sampling
from exo_node.node.chat.image_fetch import ImageFetcher, is_public
from exo_node.node.chat.images import MAX_IMAGE_BYTES
from exo_node.node.chat.requests import GenerationRequest, Image
from exo_node.placement.errors import InvalidRequest, UnsupportedParameter
from exo_node.placement.ids import ModelId, RequestId

DATA = b"\x89PNG data"
Answer = Callable[[BaseHTTPRequestHandler], None]


def sends(data: bytes, kind: str = "image/png", status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.end_headers()
        _ = handler.wfile.write(data)

    return answer


def redirects(to: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def closes(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()


def stalls(_: BaseHTTPRequestHandler) -> None:
    threading.Event().wait(2)


@contextmanager
def server(answer: Answer) -> Generator[tuple[int, list[str]]]:
    """Its port, and the paths that were asked for."""
    paths = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            (sends(DATA) if self.path.endswith("/there") else answer)(self)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.daemon_threads = True
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    try:
        yield served.server_port, paths
    finally:
        served.shutdown()
        served.server_close()


def request_of(*images: Image) -> GenerationRequest:
    fields = RequestId("r"), ModelId("m"), (), Sampling()
    return GenerationRequest(*fields, images=images)


def at(url: str) -> Image:
    return Image(b"", "", "messages[0].content[0].image_url.url", url=url)


def fetched(
    *images: Image, may_ask: Callable[[str], bool] = lambda _: True, within_s: float = 10.0
) -> tuple[Image, ...]:
    fetcher = ImageFetcher(is_allowed=True, may_ask=may_ask, within_s=within_s)
    return asyncio.run(fetcher.fetched(request_of(*images))).images


def test_images_arrive_in_their_order_with_their_types() -> None:
    picture = Image(b"here", "image/jpeg", "f")
    with server(sends(DATA)) as (port, paths):
        first, second, third = fetched(
            at(f"http://localhost:{port}/a?b=c"), picture, at(f"http://127.0.0.1:{port}/d")
        )
    assert (first.data, first.media_type, second) == (DATA, "image/png", picture)
    assert (third.data, sorted(paths)) == (DATA, ["/a?b=c", "/d"])


def test_nothing_is_fetched_unless_the_owner_allows_it() -> None:
    with server(sends(DATA)) as (port, paths):
        request = request_of(at(f"http://127.0.0.1:{port}/"))
        with pytest.raises(UnsupportedParameter, match="EXO_IMAGE_URLS=1") as caught:
            _ = asyncio.run(ImageFetcher(is_allowed=False).fetched(request))
    assert caught.value.param == request.images[0].field and paths == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "169.254.169.254", "[::ffff:127.0.0.1]"]
)
def test_private_addresses_are_not_asked(host: str) -> None:
    refused = pytest.raises(InvalidRequest, match="private network")
    with server(sends(DATA)) as (port, paths), refused:
        _ = fetched(at(f"http://{host}:{port}/"), may_ask=is_public)
    assert paths == []


@pytest.mark.parametrize(
    ("address", "is_asked"),
    [
        *((each, False) for each in ("10.9.9.9", "::", "::1", "::10.9.9.9", "fe80::1", "fec0::1")),
        *((each, False) for each in ("fc00::1", "ff02::1", "100::1", "5f00::1", "3fff::1")),
        *((each, False) for each in ("::ffff:10.9.9.9", "::ffff:0:a09:909", "64:ff9b::a09:909")),
        *((each, False) for each in ("64:ff9b:1::808:808", "2002:a09:909::1", "2001:db8::1")),
        *((each, False) for each in ("2001:0:808:808::f5f6:f6f6", "2001:0:a09:909::f7f7:f7f7")),
        *((each, True) for each in ("8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1")),
        *((each, True) for each in ("::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1")),
    ],
)
def test_an_address_is_asked_only_if_all_that_it_leads_to_is_public(
    address: str, is_asked: bool
) -> None:
    assert is_public(address) is is_asked


@pytest.mark.parametrize(
    "url",
    [
        "http://a\0b.test/x.png",
        "http://127.0.0.1:{port}/x\0.png",
        "http://127.0.0.1:{port}/\x7f",
        "http://127.0.0.1:{port}/" + "a" * 70_000,
        "http://\u24df\u0446.test/x.png",
        "http://user\u0446@127.0.0.1:{port}/x.png",
        f"http://{'a' * 70}.test/x.png",
        "http://a..b/x.png",
        "http://[::1/x.png",
    ],
)
def test_a_url_that_no_client_can_send_is_refused_by_its_field(url: str) -> None:
    with server(redirects("http://[::1")) as (port, _):
        with pytest.raises(InvalidRequest) as refused:
            _ = fetched(at(url.replace("{port}", str(port))))
        with pytest.raises(InvalidRequest):
            _ = fetched(at(f"http://127.0.0.1:{port}/"))
    assert refused.value.param == "messages[0].content[0].image_url.url"


def test_a_redirect_is_checked_like_the_first_address() -> None:
    hosts = list[str]()

    def only_first(address: str) -> bool:
        hosts.append(address)
        return len(hosts) == 1

    with server(redirects("/there")) as (port, paths):
        assert fetched(at(f"http://127.0.0.1:{port}/"))[0].data == DATA
        assert paths == ["/", "/there"]
        with pytest.raises(InvalidRequest, match="private network"):
            _ = fetched(at(f"http://127.0.0.1:{port}/"), may_ask=only_first)
    with server(redirects("/again")) as (port, paths):
        with pytest.raises(InvalidRequest, match="redirected more than 3 times"):
            _ = fetched(at(f"http://127.0.0.1:{port}/"))
        assert len(paths) == 4
    refused = pytest.raises(InvalidRequest, match="no http or https address")
    with server(redirects("file:///etc/passwd")) as (port, _), refused:
        _ = fetched(at(f"http://127.0.0.1:{port}/"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sends(b"x", status=404), "status 404"),
        (sends(b"<html>", "text/html"), "of type text/html, which is no image"),
        (sends(bytes(MAX_IMAGE_BYTES + 1)), "longer than 20 MB"),
        (closes, "could not be fetched"),
    ],
    ids=["missing", "page", "long", "closed"],
)
def test_what_is_no_image_is_refused_without_its_address(answer: Answer, words: str) -> None:
    with server(answer) as (port, _), pytest.raises(InvalidRequest, match=words) as caught:
        _ = fetched(at(f"http://127.0.0.1:{port}/secret"))
    assert "secret" not in caught.value.message
    assert caught.value.param == "messages[0].content[0].image_url.url"


def test_a_slow_host_is_not_waited_for() -> None:
    with server(stalls) as (port, _), pytest.raises(InvalidRequest, match=r"within 0\.3 s"):
        _ = fetched(at(f"http://127.0.0.1:{port}/"), within_s=0.3)


@pytest.mark.parametrize(
    "url", ["http://", "http://a b/", "http://x:99999/", "http://nowhere.invalid/"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        _ = fetched(at(url))
