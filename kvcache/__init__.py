"""The paged compressed cache: one offset table, four pools, exact accounting. Decides without I/O."""
