"""Where samples lie and how they travel: the arena of slots, batches, queues of indices, and published weights."""
