"""Images on the page: chosen, pasted and dropped, made smaller, shown, sent, and kept."""

import base64
import struct
import zlib

import pytest
from browser import Visit, send, wait_for_answer
from http_node import Node
from page_cluster import Cluster, copy, member, model
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.timeout(300)


def png(width: int, height: int) -> bytes:
    """One of a single colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xc0\x30\x20" * width) * height
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG."""
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.fixture(autouse=True)
def one_model_that_reads_images(node: Node, cluster: Cluster) -> None:
    node.chat.images = "read"
    cluster.nodes = [member(1)]
    cluster.models = [model("demo", loaded=True, nodes=1)]
    cluster.placements = [copy(1)]


def choose(page: Page, *files: tuple[str, bytes]) -> None:
    expect(page.get_by_label("Message", exact=True)).to_be_enabled()
    page.get_by_label("Choose images or text files").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in files]
    )


def chosen(page: Page, name: str, data: bytes) -> None:
    choose(page, (name, data))
    expect(page.locator(".composer .pictures img")).to_have_count(1)


def transfer(page: Page, kind: str, name: str, data: bytes) -> None:
    """A paste into the message, or a drop onto it, as the browser has it from the system."""
    script = """([kind, name, text]) => {
      const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
      const files = new DataTransfer();
      files.items.add(new File([bytes], name, { type: "image/png" }));
      const field = document.querySelector(".composer textarea");
      const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
      field.dispatchEvent(event);
    }"""
    page.evaluate(script, [kind, name, base64.b64encode(data).decode()])


def test_images_are_chosen_pasted_and_dropped_and_go_with_the_message(
    view: Visit, node: Node
) -> None:
    page = view.go("")
    composed = page.locator(".composer .pictures img")
    choose(page, ("one.png", png(40, 20)), ("two.png", png(30, 30)))
    expect(composed).to_have_count(2)
    transfer(page, "paste", "three.png", png(50, 10))
    expect(composed).to_have_count(3)
    transfer(page, "drop", "four.png", png(60, 15))
    expect(composed).to_have_count(4)
    page.get_by_role("button", name="Remove image 2").click()
    expect(composed).to_have_count(3)
    assert view.violations() == []
    send(view, "What are these?")
    wait_for_answer(view)
    (request,) = node.chat.requests
    assert [size(image.data) for image in request.images] == [(40, 20), (50, 10), (60, 15)]
    kinds = [part["type"] for part in request.messages[-1]["content"]]
    assert kinds == ["image", "image", "image", "text"]
    expect(composed).to_have_count(0)
    expect(page.locator(".question .pictures img")).to_have_count(3)
    assert view.violations() == []


def test_a_message_waits_for_its_images(view: Visit, node: Node) -> None:
    page = view.go("")
    page.get_by_label("Message", exact=True).fill("Look")
    page.evaluate(
        """() => {
          const read = createImageBitmap;
          window.createImageBitmap = (file) =>
            new Promise((done) => (window.go = () => done(read(file))));
        }"""
    )
    choose(page, ("one.png", png(40, 20)))
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    assert node.chat.requests == []
    page.evaluate("window.go()")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_answer(view)
    assert len(node.chat.requests[-1].images) == 1


def test_a_large_image_is_sent_smaller(view: Visit, node: Node) -> None:
    page = view.go("")
    choose(page, ("large.png", png(4000, 1000)))
    expect(page.locator(".composer .pictures img")).to_have_count(1)
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_answer(view)
    (request,) = node.chat.requests
    assert size(request.images[0].data) == (1568, 392)
    assert request.messages[-1]["content"] == [{"type": "image"}]
    expect(page.get_by_role("link", name="An image")).to_be_visible()


def test_what_is_no_image_is_named_and_the_message_stays(view: Visit, node: Node) -> None:
    page = view.go("")
    page.get_by_label("Message", exact=True).fill("Look")
    choose(page, ("notes.png", b"no image at all"))
    expect(page.get_by_role("alert")).to_have_text(
        "notes.png is no image that this browser can show."
    )
    expect(page.locator(".composer .pictures img")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("Look")
    assert node.chat.requests == []


def test_images_are_kept_with_the_conversation_and_go_along_in_later_turns(
    view: Visit, node: Node
) -> None:
    page = view.go("")
    chosen(page, "one.png", png(40, 20))
    send(view, "What is this?")
    wait_for_answer(view)
    page.reload()
    expect(page.locator(".question .pictures img")).to_have_count(1)
    send(view, "And now?")
    wait_for_answer(view)
    last = node.chat.requests[-1]
    assert [size(image.data) for image in last.images] == [(40, 20)]
    assert last.messages[-1]["content"] == "And now?"


def test_a_model_that_reads_no_images_says_so(view: Visit, node: Node) -> None:
    node.chat.images = "this model has no tower for images"
    page = view.go("")
    chosen(page, "one.png", png(40, 20))
    send(view, "What is this?")
    expect(page.locator(".said")).to_contain_text("The image asks the model to see pictures")
    expect(page.locator(".said")).to_contain_text("this model has no tower for images")
    expect(page.get_by_text("messages[")).to_have_count(0)
