"""The data plane: the arena of slots, batches, queues of indices, and published weights."""
