"""Images in the helper process: its limits, and whose turn it is."""

import asyncio

import pytest
from image_files import many_scans, saved, scene
from pictures import DENSE

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.grammars.grammars import GrammarSpec
from exo_node.shard.text.helper_process import HelperLimits
from exo_node.shard.text.pictures import PictureProcessor
from exo_node.shard.text.prompt_encoder import PromptEncoder


async def test_the_helper_decodes_within_limits() -> None:
    prompts = PromptEncoder(HelperLimits(image_cpu_s=0.4))
    prompts.open(DENSE)
    try:
        file = saved(scene())
        images = [each async for each in prompts.images([(file, "f"), (file, "f")])]
        assert images == [PictureProcessor(DENSE, lambda _: None).prepare(file)] * 2
        with pytest.raises(InvalidRequest, match="more time or memory") as refused:
            _ = await anext(prompts.images([(many_scans(50), "f")]))
        assert refused.value.param == "f"
        with pytest.raises(InvalidRequest, match="none of PNG") as refused:
            _ = await anext(prompts.images([(b"x", "images[0]")]))
        assert refused.value.param == "images[0]"
    finally:
        await prompts.close()


async def test_all_images_of_a_request_have_a_budget_of_time() -> None:
    prompts = PromptEncoder(HelperLimits(images_cpu_s=1e-6))
    prompts.open(DENSE)
    try:
        images = prompts.images([(saved(scene()), "first"), (saved(scene()), "second")])
        _ = await anext(images)
        with pytest.raises(InvalidRequest, match="as much as those of a request may") as late:
            _ = await anext(images)
        assert late.value.param == "second"
    finally:
        await prompts.close()


def test_clients_take_turns_with_their_images_and_grammars_do_not_wait_for_them() -> None:
    ended = list[str]()

    async def read(prompts: PromptEncoder, client: str) -> None:
        _ = await anext(prompts.images([(saved(scene()), "f")], client.encode()))
        ended.append(client)

    async def run() -> None:
        prompts = PromptEncoder()
        prompts.open(DENSE)
        try:
            async with asyncio.TaskGroup() as group:
                for client in ("many", "many", "many", "many", "few"):
                    _ = group.create_task(read(prompts, client))
            (pictures,) = prompts.pids
            await prompts.check(GrammarSpec("regex", "a", "f"))
            assert len(prompts.pids) == 2 and pictures in prompts.pids
        finally:
            await prompts.close()

    asyncio.run(run())
    assert ended.index("few") <= 1
