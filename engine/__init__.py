"""One rank's step for either phase: schedule, tensors, sampled tokens. Knows pages and models, not peers or clients."""
