"""headrace: DeepSeek-V4 served with prefill and decode on different machines."""

__version__ = "0.1.0"
