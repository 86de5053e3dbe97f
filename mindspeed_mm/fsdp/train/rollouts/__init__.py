"""Training on what the policy itself samples: rollouts, their rewards, and the micro-batches that they become."""
