"""Which turns of a conversation the target answers."""

from eyas.types import Conversation


def answer_slots(conversation: Conversation) -> list[int]:
    """Return the message indices that the target answers: assistant turns, and the one after the last."""
    messages = conversation.messages
    slots = [i for i, m in enumerate(messages) if m.role == "assistant" and i > 0]
    if messages[-1].role != "assistant":
        slots.append(len(messages))
    return slots
