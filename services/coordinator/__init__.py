"""The coordinator: membership, the slice plan, and the cluster-wide inspection API. No tensor of a step reaches it."""
