"""What `tools/train_demo.py` is made of: the demo model's text, tasks, training forward, optimiser and packing."""
