"""What block drafts (DFlash, DSpark) share: one pass of the draft proposes a whole block."""
