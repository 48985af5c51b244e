"""A kind of draft that no file of eyas knows: each token of a round is predicted from one state, by itself."""
