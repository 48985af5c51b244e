"""An engine that eyas does not know: what a new one needs, as docs/extending.md lists it."""
