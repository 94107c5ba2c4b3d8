"""A model is copied from peers: whole, resumed, checked, from another peer."""

import asyncio
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from copying import (
    LAYERS,
    MODEL,
    SECOND,
    WHOLE,
    Taker,
    Watched,
    giver,
    giving,
    silent,
    stage,
    taking,
    watch,
    write_model,
)

from exo_node.node.machine.timing import LAN
from exo_node.node.rpc.model_files import BESIDE_ANSWERS, FileSource
from exo_node.node.store.copy_folder import CopyFolder
from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.sharing import SharedModels
from exo_node.placement.errors import DownloadFailed, ModelNotFound
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.checkpoint.checkpoint import read_checkpoint


async def test_a_whole_model_is_copied_hashed_and_listed(tmp_path: Path) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    async with giving(one) as source, taking(two, source) as fetcher:
        assert MODEL not in two.library.scan()
        copy = await fetcher.fetch(
            WHOLE, lambda s, p: two.progress.append((s, p.done_bytes, p.total_bytes))
        )
        assert copy.fingerprint == read_checkpoint(copy.folder).fingerprint
    for path in (one.root / "models" / MODEL).iterdir():
        assert (two.models / MODEL / path.name).read_bytes() == path.read_bytes()
    assert two.library.scan()[MODEL].folder == two.models / MODEL
    assert two.events_of("copied") == [f"{MODEL} was copied from one"]
    step, copied, total = two.progress[-1]
    assert step == "copying from one" and copied == total > 0


async def test_a_model_that_only_peers_have_is_described_without_a_copy(tmp_path: Path) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    folder = one.root / "models" / MODEL
    async with giving(one) as source, taking(two, source) as fetcher:
        card, fingerprint = await fetcher.describe(MODEL)
    assert card == ModelLibrary([folder.parents[1]], offline=True).get(MODEL).card
    assert fingerprint == read_checkpoint(folder).fingerprint
    assert not two.models.exists()


def _card(text: str) -> Callable[[pb.ModelOffer], None]:
    def change(offer: pb.ModelOffer) -> None:
        offer.card = text or offer.card.replace(f'"id":"{MODEL}"', '"id":"maker/else"')

    return change


@pytest.mark.parametrize("text", ["{}", "[" * 9999, "nonsense", ""])
async def test_a_peer_that_describes_a_model_wrongly_is_left_for_another(
    tmp_path: Path, text: str
) -> None:
    bad, good, two = giver(tmp_path, "bad"), giver(tmp_path, "good"), Taker(tmp_path / "two")
    bad.wrap = _offer(_card(text))
    async with (
        giving(bad, "bad") as first,
        giving(good, "good") as second,
        taking(two, first, second) as fetcher,
    ):
        card, _ = await fetcher.describe(MODEL)
    assert card.id == MODEL
    assert "bad offers" in two.events_of("peer_left")[0]


async def test_loads_of_one_model_at_the_same_time_copy_it_once(tmp_path: Path) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    read = watch(one)
    async with giving(one) as source, taking(two, source) as fetcher:
        first, second = await asyncio.gather(*(fetcher.fetch(WHOLE, silent) for _ in range(2)))
        assert first == second
    assert len(read[0].reads) == len(set(read[0].reads)) > 0
    assert two.events_of("copied") == [f"{MODEL} was copied from one"]


async def test_a_copy_that_broke_off_resumes(tmp_path: Path) -> None:
    one, two = giver(tmp_path, rows=20_000), Taker(tmp_path / "two")
    read = watch(one)
    async with giving(one) as source:
        async with taking(two, source) as fetcher:
            read[0].chunks = 2
            with pytest.raises(ModelNotFound, match="one: the file cannot be read"):
                _ = await fetcher.fetch(WHOLE, silent)
        part = two.models / MODEL / f"{SECOND}.incomplete"
        assert part.stat().st_size == 2 << 20
        assert not (two.models / MODEL / SECOND).exists()
        read[0].chunks, read[0].reads = 1 << 30, []
        async with taking(two, source) as fetcher:
            fingerprint = read_checkpoint(one.root / "models" / MODEL).fingerprint
            copy = await fetcher.fetch(stage(0, LAYERS, fingerprint), silent)
        assert (SECOND, 2 << 20) in read[0].reads
        assert ("model-00001-of-00003.safetensors", 0) not in read[0].reads
        original = one.root / "models" / MODEL / SECOND
        assert (copy.folder / SECOND).read_bytes() == original.read_bytes()


async def test_a_part_of_another_version_is_dropped_and_the_peer_is_not_blamed(
    tmp_path: Path,
) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    async with giving(one) as source, taking(two, source) as fetcher:
        library = ModelLibrary([one.root / "models"], offline=True)
        CopyFolder(two.models / MODEL).begin(MODEL, SharedModels(library).offer(MODEL))
        _ = (two.models / MODEL / f"{SECOND}.incomplete").write_bytes(b"other bytes")
        copy = await fetcher.fetch(WHOLE, silent)
        original = one.root / "models" / MODEL / SECOND
        assert (copy.folder / SECOND).read_bytes() == original.read_bytes()
        assert two.events_of("peer_left") == []


async def test_a_peer_that_sends_wrong_bytes_is_named_and_left_for_another(tmp_path: Path) -> None:
    bad, good, two = giver(tmp_path, "bad"), giver(tmp_path, "good"), Taker(tmp_path / "two")
    read = watch(bad)
    async with (
        giving(bad, "bad") as first,
        giving(good, "good") as second,
        taking(two, first, second) as fetcher,
    ):
        read[0].spoil = SECOND
        copy = await fetcher.fetch(WHOLE, silent)
        original = good.root / "models" / MODEL / SECOND
        assert (copy.folder / SECOND).read_bytes() == original.read_bytes()
    [text] = two.events_of("peer_left")
    assert "bad sent wrong bytes of model-00002" in text
    assert two.events_of("copied") == [f"{MODEL} was copied from good"]


async def test_a_peer_that_sends_byte_after_byte_is_left_for_another(tmp_path: Path) -> None:
    """It is never silent, and its model would not be here in a year."""
    slow, good = (giver(tmp_path, name, rows=20_000) for name in ("slow", "good"))
    two = Taker(tmp_path / "two")
    read = watch(slow)
    async with (
        asyncio.timeout(60),
        giving(slow, "slow") as first,
        giving(good, "good") as second,
        taking(two, first, second, timing=replace(LAN, stall_s=1.0)) as fetcher,
    ):
        read[0].drips = True
        copy = await fetcher.fetch(WHOLE, silent)
        original = good.root / "models" / MODEL / SECOND
        assert (copy.folder / SECOND).read_bytes() == original.read_bytes()
    [text] = two.events_of("peer_left")
    assert "bytes in 1 s" in text
    assert two.events_of("copied") == [f"{MODEL} was copied from good"]


async def test_another_revision_is_not_mixed_in(tmp_path: Path) -> None:
    one, two = giver(tmp_path, rows=20_000), Taker(tmp_path / "two")
    read = watch(one)
    async with giving(one) as source, taking(two, source) as fetcher:
        other = stage(0, LAYERS, checkpoint_sha256="0" * 64)
        with pytest.raises(ModelNotFound, match="one has another revision"):
            _ = await fetcher.fetch(other, silent)
        read[0].chunks = 2
        with pytest.raises(ModelNotFound, match="cannot be read"):
            _ = await fetcher.fetch(WHOLE, silent)
        read[0].chunks = 1 << 30
        shutil.rmtree(one.root / "models")
        _ = write_model(one.root / "models" / MODEL, rows=32)
        copy = await fetcher.fetch(WHOLE, silent)
        for path in (one.root / "models" / MODEL).iterdir():
            assert (copy.folder / path.name).read_bytes() == path.read_bytes()


async def test_a_model_that_no_node_has(tmp_path: Path) -> None:
    two = Taker(tmp_path / "two")
    async with taking(two) as fetcher:
        with pytest.raises(ModelNotFound, match="exo-node models pull maker/tiny"):
            _ = await fetcher.fetch(WHOLE, silent)


async def test_a_folder_in_the_way_is_not_touched(tmp_path: Path) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    own = two.models / MODEL / "notes.txt"
    own.parent.mkdir(parents=True)
    _ = own.write_text("mine")
    async with giving(one) as source, taking(two, source) as fetcher:
        with pytest.raises(DownloadFailed, match="in the way"):
            _ = await fetcher.fetch(WHOLE, silent)
    assert own.read_text() == "mine"


async def test_copies_are_slowed_while_answers_run(tmp_path: Path) -> None:
    one, two = giver(tmp_path, rows=20_000), Taker(tmp_path / "two")
    one.busy = lambda: True
    size = sum(path.stat().st_size for path in (one.root / "models" / MODEL).iterdir())
    async with giving(one) as source, taking(two, source) as fetcher:
        _ = await fetcher.fetch(WHOLE, silent)
    assert sum(one.slept) == pytest.approx(size / BESIDE_ANSWERS)


def _offer(change: Callable[[pb.ModelOffer], None]) -> Callable[[SharedModels], FileSource]:
    class Lying(Watched):
        def offer(self, model: str) -> pb.ModelOffer:
            offer = self.files.offer(model)
            change(offer)
            return offer

    return Lying


def _add(path: str, size: int = 1, sha256: str = "0" * 64) -> Callable[[pb.ModelOffer], None]:
    def change(offer: pb.ModelOffer) -> None:
        offer.files.append(pb.OfferedFile(path=path, size=size, sha256=sha256))

    return change


def _no_files(offer: pb.ModelOffer) -> None:
    offer.ClearField("files")


def _no_fingerprint(offer: pb.ModelOffer) -> None:
    offer.fingerprint = ""


@pytest.mark.parametrize(
    "lie",
    [
        _add("../../evil.json"),
        _add("/etc/cron.d/x.json"),
        _add("sub/x.json"),
        _add("run.py"),
        _add("model\n.json"),
        _add("exo-copy.json"),
        _add("x" * 300 + ".json"),
        _add("config.json"),
        _add("big.json", size=1 << 40),
        _add("model-9.safetensors", size=1 << 50),
        _add("a.json", sha256="../../x"),
        _add("a.json", sha256=""),
        _no_files,
        _no_fingerprint,
    ],
)
async def test_a_hostile_offer_is_refused_and_writes_nothing(
    tmp_path: Path, lie: Callable[[pb.ModelOffer], None]
) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    one.wrap = _offer(lie)
    async with giving(one) as source, taking(two, source) as fetcher:
        with pytest.raises(ModelNotFound, match="one offers"):
            _ = await fetcher.fetch(WHOLE, silent)
    assert not two.models.exists()
    assert len(two.events_of("peer_left")) == 1


@pytest.mark.parametrize("model", ["../up", "a/../b", "/etc", "a/b/c", ".hidden", "a\\b", "a\nb"])
async def test_an_id_that_is_no_folder_is_refused(tmp_path: Path, model: str) -> None:
    two = Taker(tmp_path / "two")
    one = giver(tmp_path)
    async with giving(one) as source, taking(two, source) as fetcher:
        spec = pb.StageSpec(model=model, num_stages=1, num_layers=LAYERS, end_layer=LAYERS)
        with pytest.raises(DownloadFailed, match="cannot be a folder"):
            _ = await fetcher.fetch(spec, silent)


def _roomy(_: object) -> SimpleNamespace:
    return SimpleNamespace(free=1 << 40)


def test_a_full_disk_is_named_and_the_copy_resumes_later(tmp_path: Path) -> None:
    one, two = giver(tmp_path, rows=20_000), Taker(tmp_path / "two")
    two.models.mkdir(parents=True)
    small = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(two.models)]
    if shutil.which("mount") is None or subprocess.call(small, stderr=subprocess.DEVNULL):
        pytest.skip("needs the right to mount")

    async def run() -> None:
        async with giving(one) as source:
            async with taking(two, source) as fetcher:
                with pytest.raises(DownloadFailed, match=r"GB more in .* are free. Free some"):
                    _ = await fetcher.fetch(WHOLE, silent)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shutil, "disk_usage", _roomy)
                async with taking(two, source) as fetcher:
                    with pytest.raises(DownloadFailed, match=r"No space left.*goes on where"):
                        _ = await fetcher.fetch(WHOLE, silent)
            assert list((two.models / MODEL).glob("*.incomplete"))
            larger = ["mount", "-o", "remount,size=256m", str(two.models)]
            subprocess.check_call(larger)
            async with taking(two, source) as fetcher:
                copy = await fetcher.fetch(WHOLE, silent)
            digests = [
                hashlib.sha256(path.read_bytes()).hexdigest()
                for path in (copy.folder / SECOND, one.root / "models" / MODEL / SECOND)
            ]
            assert digests[0] == digests[1]

    try:
        asyncio.run(run())
    finally:
        subprocess.check_call(["umount", str(two.models)])
