"""The names that roles have in published data."""

from collections.abc import Mapping

# Spellings of ShareGPT and its descendants. ``function_call`` is an assistant turn that holds only a call.
_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


def role_of(name: str, role_map: Mapping[str, str]) -> str:
    """Return the role of a name; ``role_map`` is asked first, and an unknown name is returned as it is."""
    plain = name.strip().lower()
    return role_map.get(name) or _NAMES.get(plain, plain)
