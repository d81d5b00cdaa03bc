"""AttachedPages: what a page of the pool still says of its former content."""

from __future__ import annotations

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.block_pool import BlockPool
from engine.kv.host.host_pool import HostPool


def test_a_page_that_is_freed_after_its_block_was_evicted_is_not_marked_any_more() -> None:
    blocks = BlockPool(1)
    attached = AttachedPages(1, blocks.blocks, HostPool(0), lambda block_id: None)
    block, page = blocks.take(), attached.take()
    block.block_hash = 5
    attached.cache(block.block_id, page)
    attached.retain_longer(block.block_id, 2)
    assert page.retention == 2
    attached.retain(block.block_id)
    block.forget_content()
    attached.release(block.block_id)
    assert attached.pages.num_uncached == 1
    assert page.retention == 0
