"""Which turns of a conversation the target answers."""

from eyas.types import Conversation


def answer_slots(conversation: Conversation) -> list[int]:
    """Return the indices of the messages that the target writes: trained answers, and one after the last.

    An answer that is context only stays as it is: a later prompt holds the text that the data has there.
    """
    messages = conversation.messages
    slots = [i for i, m in enumerate(messages) if m.role == "assistant" and i > 0 and m.trained]
    if messages[-1].role != "assistant":
        slots.append(len(messages))
    return slots


def why_no_slot(conversation: Conversation) -> str:
    """Return the drop reason of a conversation in which the target answers nothing."""
    marked = any(not m.trained for m in conversation.messages[1:])
    return "marked_not_trained" if marked else "starts_with_assistant"
