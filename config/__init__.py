"""One frozen tree of settings, from file, environment and flags; a room gets its section, not the tree."""
