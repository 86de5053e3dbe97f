"""Parameters, gradients and optimizer states over the ranks of a group, by `fully_shard`."""
