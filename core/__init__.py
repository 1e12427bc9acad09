"""Nouns that every room shares: ids, errors, time, block hashes, segments, sampling. Standard library only."""
