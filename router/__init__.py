"""The edge: HTTP and gRPC, chat format, tokenizer, placement, retries, migration. No torch, no tensors, no pages."""
