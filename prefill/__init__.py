"""The prefill worker: computes a prompt once its taker has room, sends the first token, serves the pages."""
