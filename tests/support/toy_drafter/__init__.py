"""A kind of draft that no file of eyas knows: it drafts each token of a round by itself."""
