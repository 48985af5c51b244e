"""The DFlash draft: the backbone of block drafts and the target's head, nothing more."""

from eyas.drafters.common.block.model import BlockDraft


class DFlashDraft(BlockDraft):
    """Source: the layout of vLLM's ``DFlashDraftModel``."""
