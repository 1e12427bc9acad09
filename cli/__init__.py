"""The `headrace` command: serve, router, prefill, decode, layout, demo, version. Rooms are imported in functions."""
