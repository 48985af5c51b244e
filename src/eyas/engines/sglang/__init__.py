"""SGLang as a server of drafts: eyas prints its command and measures it over HTTP."""
