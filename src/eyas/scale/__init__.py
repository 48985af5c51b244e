"""Work that is spread over processes and machines by Ray."""
