"""A kind of draft that no file of eyas knows: every token of a round from the state before it, each by itself."""
