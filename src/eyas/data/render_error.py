"""Why a conversation cannot be rendered."""


class RenderError(ValueError):
    """The template refuses a conversation, or renders it in a way that no server would produce.

    Its text is the drop reason: a fixed word, and the template's own words behind it.
    """
