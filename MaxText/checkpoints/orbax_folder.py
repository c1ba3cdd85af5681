"""Our own checkpoint folder: an Orbax checkpoint a component, and a description that says what it is."""

DESCRIPTION = "maxtext_checkpoint.json"
