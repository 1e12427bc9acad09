"""DeepSeek-V4 as plain torch modules, and the reading of its checkpoints. A forward pass; no serving, no cache."""
