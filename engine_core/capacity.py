"""The sizes of an engine, and the one answer to "can this request ever run". Pure."""

from dataclasses import dataclass

from protocol.errors import ErrorCode, PagetideError


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that decide what can run."""

    num_blocks: int
    block_size: int
    max_context: int  # tokens
    max_running: int
    prefill_chunk_tokens: int
    prefix_cache: bool = True
    block_bytes: int = 1

    def answer_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """The one answer to "can this ever run": how many tokens a request may generate, at least 1.

        More than the context leaves is clipped. Raises PagetideError if the prompt leaves no room for a token.
        """
        context = min(self.max_context, self.num_blocks * self.block_size)
        if prompt_tokens >= context:
            raise PagetideError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {prompt_tokens} tokens; the context holds {context}, of which at least one is for the "
                "answer",
                "prompt",
            )
        room = context - prompt_tokens
        return room if max_tokens is None else min(max_tokens, room)
