"""Shipping pages: staged pulls from another worker's send buffers into our own landing buffers.

Knows buffers, segments, leases and links; not models, tensors or requests. `service.py` says how to use it.
"""
